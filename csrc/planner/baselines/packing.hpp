// Best-fit packing: each item goes to the fullest bin that still has room for it; of two with equal
// room to the older one. Bins are numbered as they open.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "planner/base/types.hpp"

namespace hdp {

// Items in any order.
class BestFit {
 public:
  explicit BestFit(int64_t capacity) : capacity_(capacity) {}

  // The bin that takes an item of at most `capacity` tokens.
  int64_t place(int64_t tokens);

 private:
  using Bins = std::vector<int32_t>;  // a heap, the oldest first

  int64_t capacity_;
  int32_t num_bins_ = 0;
  std::map<int64_t, Bins> open_;  // by room; none of no room
};

// Items none of which has more tokens than the one before, nor fewer than `least`. So a bin without
// room for the current item sleeps until items are small enough, and of those awake the fullest is
// the best fit.
class BestFitDecreasing {
 public:
  explicit BestFitDecreasing(int64_t capacity, int64_t least = 1)
      : capacity_(capacity), least_(least) {}

  // The most tokens that the next item may have for a bin to have room.
  int64_t most() const {
    if (!awake_.empty()) return capacity_;  // items do not grow
    return asleep_.empty() ? 0 : asleep_.front().first;
  }

  // The bin that takes an item; one of more than `capacity` tokens gets a bin of its own.
  int64_t place(int64_t tokens);

 private:
  using Entry = std::pair<int64_t, int64_t>;  // (room, bin)

  int64_t capacity_;
  int64_t least_;
  int64_t num_bins_ = 0;
  std::vector<Entry> awake_;   // a heap, the least room first
  std::vector<Entry> asleep_;  // a heap, the most room first; none of less room than `least`
};

// Which items are in which bin, and bins as micro-batches: without a list for each, as there may be
// millions of both.
class Packed {
 public:
  explicit Packed(std::size_t num_items) { bins_.reserve(num_items); }

  int64_t num_bins() const { return static_cast<int64_t>(places_.size()); }

  // Notes the bin of the next item; a new bin has the number num_bins().
  void add(int64_t bin);

  // Appends the bin to the plan, with room for its items.
  void open(int64_t bin, const std::vector<int32_t>& ring, Plan& plan);

  // Puts the next item into the room of its bin. All bins are open, and the items come again in the
  // order in which they were noted.
  void put(SequenceId id, Plan& plan);

 private:
  std::vector<int32_t> bins_;    // of each item
  std::vector<int32_t> places_;  // of each bin: its items; once open, its next item's in the plan
  std::size_t next_ = 0;
};

}  // namespace hdp
