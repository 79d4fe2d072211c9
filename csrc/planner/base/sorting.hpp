// The one order in which strategies look at sequences.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/base/types.hpp"

namespace hdp {

// Sequence ids by descending length; of equal lengths the lower id first.
std::vector<SequenceId> longest_first(const Lengths& lengths);

// Lengths in that order, neighbours in memory as they are used; four bytes each if that holds the
// longest.
class SortedLengths {
 public:
  SortedLengths(const Lengths& lengths, const std::vector<SequenceId>& order);

  std::size_t size() const { return short_.size() + long_.size(); }

  int64_t operator[](std::size_t place) const {
    return long_.empty() ? short_[place] : long_[place];
  }

  // The first place with at most so many tokens; size() if there is none.
  std::size_t first_within(int64_t limit) const;

 private:
  std::vector<uint32_t> short_;  // all of them, or none
  std::vector<int64_t> long_;    // the other way round
};

}  // namespace hdp
