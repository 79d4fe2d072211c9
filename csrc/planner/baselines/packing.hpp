// Best-fit packing: each item goes to the fullest bin that still has room for it; of two with equal
// room to the older one. Bins are numbered as they open.
#pragma once

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "planner/base/types.hpp"

namespace hdp {

// Items in any order.
class BestFit {
 public:
  explicit BestFit(int64_t capacity) : capacity_(capacity) {}

  int64_t num_bins() const { return num_bins_; }

  // The bin that takes an item of at most `capacity` tokens.
  int64_t place(int64_t tokens);

 private:
  int64_t capacity_;
  int64_t num_bins_ = 0;
  std::set<std::pair<int64_t, int64_t>> open_;  // (room, bin), full bins left out
};

// Items none of which has more tokens than the one before. So a bin without room for the current
// item sleeps until items are small enough, and of those awake the fullest is the best fit.
class BestFitDecreasing {
 public:
  explicit BestFitDecreasing(int64_t capacity) : capacity_(capacity) {}

  int64_t num_bins() const { return num_bins_; }

  // Whether a bin has room, so that place() would not open another.
  bool fits(int64_t tokens) const {
    return !awake_.empty() || (!asleep_.empty() && asleep_.front().first >= tokens);
  }

  // The bin that takes an item; one of more than `capacity` tokens gets a bin of its own.
  int64_t place(int64_t tokens);

 private:
  using Entry = std::pair<int64_t, int64_t>;  // (room, bin)

  int64_t capacity_;
  int64_t num_bins_ = 0;
  std::vector<Entry> awake_;   // a heap, the least room first
  std::vector<Entry> asleep_;  // a heap, the most room first
};

// Which items are in which bin, and bins as micro-batches: without a list for each, as there may be
// millions of both.
class Packed {
 public:
  int64_t num_bins() const { return static_cast<int64_t>(sizes_.size()); }

  // Notes the bin of the next item; a new bin has the number num_bins().
  void add(int64_t bin);

  // Appends the bin to the plan, with room for its items.
  void open(int64_t bin, const std::vector<int32_t>& ring, Plan& plan);

  // Puts the next item into the room of its bin. All bins are open, and the items come again in the
  // order in which they were noted.
  void put(int64_t id, Plan& plan);

 private:
  std::vector<int32_t> bins_;   // of each item
  std::vector<int64_t> sizes_;  // items of each bin
  std::vector<int64_t> ends_;   // where a bin's next item goes in the plan
  std::size_t next_ = 0;
};

}  // namespace hdp
