// The strategies, each a pure function from a checked problem to a plan.
#pragma once

#include "planner/types.hpp"

namespace hdp {

// The fixed DP x CP mesh: every sequence shared by all ranks of one of N / cp groups of
// consecutive ranks, packed best fit in the order given, bins dealt round-robin to the groups.
// Throws std::invalid_argument if no divisor of N holds max_length.
Plan static_mesh(const Problem& problem);

// Algorithm 1 of the ByteScale paper: the least degree by memory, a micro-batch of its own for
// each long sequence, best fit decreasing for the short ones, ranks with the fewest micro-batches.
// Blind to time.
Plan naive(const Problem& problem);

// Equalises the ranks' times with as little ring traffic as that allows. Of its own drafts and the
// other two strategies' plans it takes one that simulate() finds no slower than either of those two
// and nearly as fast as the fastest: of these the one with the least ring traffic.
Plan dp_balance(const Problem& problem);

}  // namespace hdp
