// The time a plan takes: what the strategies compare their candidates by.
#pragma once

#include <cstdint>

#include "planner/types.hpp"

namespace hdp {

struct Schedule {
  double makespan_s = 0;
  double ring_tokens = 0;  // tokens that cross from one rank to the next, forward
  int64_t max_tokens_on_a_rank = 0;
};

// Whether all ranks of a ring share a node.
bool in_one_node(const std::vector<int32_t>& ranks, int64_t ranks_per_node);

// Runs the micro-batches in launch order: the members of a ring wait for each other at the start,
// and all of them take the time of the slowest.
Schedule simulate(const Problem& problem, const Plan& plan);

}  // namespace hdp
