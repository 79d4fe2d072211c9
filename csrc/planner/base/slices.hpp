// How many padded tokens of a sequence one rank holds, and the least degree that fits.
#pragma once

#include <cstdint>

namespace hdp {

// Tokens of one of the 2 * degree chunks; at degree 1 the whole padded sequence.
int64_t chunk_tokens(int64_t length, int64_t degree, int64_t slice_multiple);

// Padded tokens of one rank's slice: chunks j and 2 * degree - 1 - j.
int64_t slice_tokens(int64_t length, int64_t degree, int64_t slice_multiple);

// The least degree whose slice has at most `capacity` tokens; 0 if no degree has (the smallest
// slice of a shared sequence has 2 * slice_multiple tokens).
int64_t least_degree(int64_t length, int64_t capacity, int64_t slice_multiple);

}  // namespace hdp
