// The strategies that dp-balance and pp-balance are measured by: pure functions from a checked
// problem to a plan.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/base/types.hpp"

namespace hdp {

// The fixed DP x CP mesh: every sequence shared by all ranks of one of N / cp groups of
// consecutive ranks, packed best fit in the order given, bins dealt round-robin to the groups.
// Throws std::invalid_argument if no divisor of N holds max_length; where sequences may stream, all
// ranks take those together that they hold, and the others as streams.
Plan static_mesh(const Problem& problem);

// The degree of the static mesh: the least divisor of the number of ranks at which a sequence of
// max_length tokens fits; 0 if there is none.
int64_t static_degree(const Problem& problem);

// No static mesh takes less: as if all of its micro-batches were one.
double static_mesh_bound_s(const Problem& problem);

// Algorithm 1 of the ByteScale paper: degrees by memory (see memory_degree()), a micro-batch of its
// own for each long sequence, best fit decreasing for the short ones, ranks with the fewest
// micro-batches. Blind to time.
Plan naive(const Problem& problem);

// The same with the sequences' order (longest first) given; nothing if the rings of the long
// sequences, before all others are placed, show that it takes more than `limit_s`.
std::optional<Plan> naive_within(const Problem& problem, const std::vector<SequenceId>& order,
                                 double limit_s);

// Algorithm 2 of the ByteScale paper without pipeline stages: in rounds, the ranks that are behind
// take micro-batches from buckets of equal compute, long sequences first. Memory alone decides on
// degrees; what the paper leaves open is decided in bytescale.cpp.
Plan bytescale(const Problem& problem);

// Dynamic context parallelism of Megatron-LM's dev branch: in rounds, groups of a power of two of
// ranks share what is left, longest first, so that every rank runs one micro-batch a round; so each
// stands at one position on all its ranks. Throws std::invalid_argument if no power of two of the
// ranks holds max_length.
Plan dynamic_cp(const Problem& problem);

// The room that a sequence takes on each rank of a group: enough at every degree from this one up,
// since it may be widened. A slice of few tokens takes more padding at two ranks than at one.
int64_t room_for(const Problem& problem, int64_t length, int64_t degree);

// Throws std::invalid_argument if no power of two of the ranks holds max_length.
void require_powers_hold(const Problem& problem, const std::string& strategy);

}  // namespace hdp
