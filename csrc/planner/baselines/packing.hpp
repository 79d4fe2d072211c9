// Best-fit packing: each item goes to the fullest bin that still has room for it.
#pragma once

#include <cstdint>
#include <set>
#include <utility>

namespace hdp {

class BestFit {
 public:
  explicit BestFit(int64_t capacity) : capacity_(capacity) {}

  int64_t num_bins() const { return num_bins_; }

  // Whether an open bin has room, so that place() would not open another.
  bool fits(int64_t tokens) const { return !open_.empty() && open_.rbegin()->first >= tokens; }

  // The bin that takes an item of at most `capacity` tokens; bins are numbered as they open, and
  // of two with equal room the older one is taken.
  int64_t place(int64_t tokens);

 private:
  int64_t capacity_;
  int64_t num_bins_ = 0;
  std::set<std::pair<int64_t, int64_t>> open_;  // (room, bin), full bins left out
};

}  // namespace hdp
