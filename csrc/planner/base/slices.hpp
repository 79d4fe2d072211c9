// How many padded tokens of a sequence one rank holds, and the least degree that fits.
#pragma once

#include <algorithm>
#include <cstdint>

namespace hdp {

inline int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Padded tokens of one rank's slice: chunks j and 2 * degree - 1 - j of 2 * degree; at degree 1 the
// whole sequence.
inline int64_t slice_tokens(int64_t length, int64_t degree, int64_t slice_multiple) {
  int64_t chunk = degree == 1 ? length : ceil_div(length, 2 * degree);
  if (slice_multiple != 1) chunk = ceil_div(chunk, slice_multiple) * slice_multiple;
  return (degree == 1 ? 1 : 2) * chunk;
}

// The least degree whose slice has at most `capacity` tokens; 0 if no degree has (the smallest
// slice of a shared sequence has 2 * slice_multiple tokens).
inline int64_t least_degree(int64_t length, int64_t capacity, int64_t slice_multiple) {
  if (slice_tokens(length, 1, slice_multiple) <= capacity) return 1;
  const int64_t largest_chunk = capacity / 2 / slice_multiple * slice_multiple;
  if (largest_chunk == 0) return 0;
  return std::max<int64_t>(2, ceil_div(length, 2 * largest_chunk));
}

}  // namespace hdp
