// The one order in which strategies look at sequences.
#pragma once

#include <cstdint>
#include <vector>

namespace hdp {

// Sequence ids by descending length; of equal lengths the lower id first.
std::vector<int64_t> longest_first(const std::vector<int64_t>& lengths);

}  // namespace hdp
