// In which way a sequence runs on a ring: as it is, by offload, recomputed, or as a stream. Memory
// decides; at each degree there is one way at most.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/cost_model.hpp"
#include "planner/base/parts.hpp"
#include "planner/base/types.hpp"

namespace hdp {

// Seconds of a sequence that has a ring to itself, all included, in parts of these sizes. `speed`
// is that of the slowest member.
double sequence_s(const Problem& problem, int64_t length, int64_t degree,
                  const std::vector<PartSize>& sizes, Links links, double speed = 1);

// The same of one that runs whole.
double sequence_s(const Problem& problem, int64_t length, int64_t degree, Links links,
                  double speed = 1);

// Appends a micro-batch of that sequence on that ring. Throws std::invalid_argument if memory holds
// it in no way.
void add_sequence(const Problem& problem, const std::vector<int32_t>& ring, SequenceId id,
                  Plan& plan);

}  // namespace hdp
