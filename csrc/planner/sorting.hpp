// The one order in which strategies look at sequences.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace hdp {

// Sequence ids by descending length; of equal lengths the lower id first.
inline std::vector<int64_t> longest_first(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> ids(lengths.size());
  std::iota(ids.begin(), ids.end(), int64_t{0});
  std::stable_sort(ids.begin(), ids.end(), [&](int64_t left, int64_t right) {
    return lengths[static_cast<std::size_t>(left)] > lengths[static_cast<std::size_t>(right)];
  });
  return ids;
}

}  // namespace hdp
