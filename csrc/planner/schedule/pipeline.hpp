// The exact 1F1B schedule of ranks that are pipelines of several stages, plain or interleaved.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/types.hpp"

namespace hdp {

// The first micro-batch that does not stand at the same position in the lists of all its ranks;
// -1 if there is none.
int64_t first_misplaced(const Problem& problem, const Plan& plan);

// Micro-batches that a stage runs through one model chunk before the next; a rank's count is padded
// to a multiple of it.
int64_t group_size(const Problem& problem);

// When each rank ends, if micro-batch m, on ranks [offsets[m], offsets[m + 1]), takes seconds[m]
// over all stages, a third of it forward. Every micro-batch must stand at one position. The ranks
// may be fewer or others than the problem's, of which only stages, chunks and weights count.
std::vector<double> pipeline_ends(const Problem& problem, const std::vector<int32_t>& rank_offsets,
                                  const std::vector<int32_t>& ranks,
                                  const std::vector<double>& seconds, int64_t num_ranks);

}  // namespace hdp
