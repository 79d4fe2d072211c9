#include "planner/base/slices.hpp"

#include <algorithm>

namespace hdp {
namespace {

int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

}  // namespace

int64_t chunk_tokens(int64_t length, int64_t degree, int64_t slice_multiple) {
  const int64_t chunk = degree == 1 ? length : ceil_div(length, 2 * degree);
  if (slice_multiple == 1) return chunk;
  return ceil_div(chunk, slice_multiple) * slice_multiple;
}

int64_t slice_tokens(int64_t length, int64_t degree, int64_t slice_multiple) {
  return (degree == 1 ? 1 : 2) * chunk_tokens(length, degree, slice_multiple);
}

int64_t least_degree(int64_t length, int64_t capacity, int64_t slice_multiple) {
  if (slice_tokens(length, 1, slice_multiple) <= capacity) return 1;
  const int64_t largest_chunk = capacity / 2 / slice_multiple * slice_multiple;
  if (largest_chunk == 0) return 0;
  return std::max<int64_t>(2, ceil_div(length, 2 * largest_chunk));
}

}  // namespace hdp
