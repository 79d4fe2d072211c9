// dp-balance: how many ranks may share a sequence, and how many should at first.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/rings/batch.hpp"

namespace hdp {

// Of the big sequences, by place; all others have degree 1.
using Degrees = std::vector<int32_t>;

// Degrees N, N/2, N/4 ... for N ranks that form rings: blocks of such sizes nest, so that no rank
// waits for a ring to assemble. So do three quarters of them, each with the quarter that is left.
struct Nesting {
  int64_t num_ranks = 1;
  bool three_quarters = false;
};

// Whether `degree` ranks hold the sequence in chunks of at least slice_multiple tokens; shorter
// ones are for its memory minimum only.
bool may_share(const Problem& problem, int64_t length, int64_t least, int64_t degree);

// Degrees that leave no sequence more than `longest_s`: the memory minimum, raised as far as that
// takes, but not so far that traffic is exposed (unless the sequence would alone outlast the bound)
// or chunks become shorter than slice_multiple. Where there is a choice, one that nests.
Degrees balanced_degrees(const Batch& batch, const Nesting& nesting, double longest_s);

// Rows of the longest sequences first, as wide as hides their traffic, each row on all ranks; the
// other sequences with at most `share` of the time that is then left to a rank, as above. Empty if
// no time is left.
Degrees layered_degrees(const Batch& batch, const Nesting& nesting, int64_t num_rows, double share);

// The least and the greatest degree of the nesting in [low, high]; 0 if there is none.
int64_t least_nested(const Nesting& nesting, int64_t low, int64_t high);
int64_t greatest_nested(const Nesting& nesting, int64_t low, int64_t high);

}  // namespace hdp
