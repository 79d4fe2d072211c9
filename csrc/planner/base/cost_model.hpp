// The cost model: what a sequence costs on a ring, and what no plan can beat.
#pragma once

#include <cstdint>

#include "planner/base/types.hpp"

namespace hdp {

// Seconds of attention of a whole sequence on one rank: a s^2, or what the table says.
double attention_s(const CostModel& cost, int64_t length);

// The same per token.
double attention_per_token_s(const CostModel& cost, int64_t length);

// Seconds of a whole sequence on one rank: attention and b s. It never falls with the length.
double compute_s(const CostModel& cost, int64_t length);

// Seconds one rank of a ring spends sending: K and V once forward, K, V and their gradients
// backward, (degree - 1) / degree of the ring's tokens each.
double transfer_s(const CostModel& cost, int64_t degree, double tokens, bool one_node);

// Seconds of one sequence that has a ring to itself, its exposed traffic included, g left out.
// `speed` is that of the slowest member.
double ring_s(const CostModel& cost, int64_t length, int64_t degree, bool one_node,
              double speed = 1);

// The greatest degree in [1, num_ranks] whose traffic hides under the sequence's attention.
int64_t greatest_hidden_degree(const CostModel& cost, int64_t length, int64_t num_ranks);

// The greatest length whose compute_s is at most `seconds` (at most 2^41).
int64_t length_within(const CostModel& cost, double seconds);

// Seconds of all sequences on one rank of speed 1, without g.
double total_compute_s(const Problem& problem);

// The sum of all ranks' speeds.
double total_speed(const Problem& problem);

}  // namespace hdp
