// dp-balance: the decisions, from first candidates and a search.
#pragma once

#include <cstdint>

#include "planner/dp_balance/candidate.hpp"
#include "planner/rings/batch.hpp"
#include "planner/rings/rings.hpp"

namespace hdp {

// The decisions with the least estimated makespan that were found; of those nearly as fast the ones
// found first, which have less ring traffic.
Decisions best_decisions(const Batch& batch);

// Improves decisions by changing the degree of one sequence at a time.
// Shortens the estimated makespan until it is at most `enough_s`, nothing helps or `num_tries` (how
// many changes may be tried, which it counts down) is 0. Only sequences that are in the way are
// changed: those on the rank that ends last and those whose ring keeps ranks waiting.
Candidate search_degrees(const Batch& batch, Candidate candidate, double enough_s,
                         int64_t& num_tries);

}  // namespace hdp
