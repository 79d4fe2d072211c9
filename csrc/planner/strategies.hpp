// The strategies, each a pure function from a checked problem to a plan.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "planner/schedule.hpp"
#include "planner/types.hpp"

namespace hdp {

// The fixed DP x CP mesh: every sequence shared by all ranks of one of N / cp groups of
// consecutive ranks, packed best fit in the order given, bins dealt round-robin to the groups.
// Throws std::invalid_argument if no divisor of N holds max_length.
Plan static_mesh(const Problem& problem);

// No static mesh takes less: as if all of its micro-batches were one.
double static_mesh_bound_s(const Problem& problem);

// Algorithm 1 of the ByteScale paper: the least degree by memory (offload included), a micro-batch
// of its own for each long sequence, best fit decreasing for the short ones, ranks with the fewest
// micro-batches. Blind to time.
Plan naive(const Problem& problem);

// The same with the sequences' order (longest first) given; nothing if the rings of the long
// sequences alone take more than `limit_s`.
std::optional<Plan> naive_within(const Problem& problem, const std::vector<int64_t>& order,
                                 double limit_s);

// Algorithm 2 of the ByteScale paper without pipeline stages: in rounds, the ranks that are behind
// take micro-batches from buckets of equal compute, long sequences first. Memory alone decides on
// degrees; what the paper leaves open is decided in bytescale.cpp.
Plan bytescale(const Problem& problem);

// Equalises the ranks' times with as little ring traffic as that allows. Of its own drafts and the
// other two strategies' plans it takes one that simulate() finds no slower than either of those two
// and nearly as fast as the fastest: of these the one with the least ring traffic.
Scheduled dp_balance(const Problem& problem);

// For pipelines: every micro-batch at one position in the lists of its ranks, alike times side by
// side and one after the other, less work for ranks in long rings (they wait for these to pass all
// stages), light micro-batches first. Searches for the arrangement of rounds of rings on sketches
// in which short sequences are a fluid; works out the best. Never slower than the other two where
// they keep the rule of positions.
Plan pp_balance(const Problem& problem);

}  // namespace hdp
