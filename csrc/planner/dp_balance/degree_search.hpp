// dp-balance: improves decisions by changing the degree of one sequence at a time.
#pragma once

#include <cstdint>

#include "planner/dp_balance/candidate.hpp"
#include "planner/rings/batch.hpp"

namespace hdp {

// Shortens the estimated makespan until it is at most `enough_s`, nothing helps or `num_tries` (how
// many changes may be tried, which it counts down) is 0. Only sequences that are in the way are
// changed: those on the rank that ends last and those whose ring keeps ranks waiting.
Candidate search_degrees(const Batch& batch, Candidate candidate, double enough_s,
                         int64_t& num_tries);

}  // namespace hdp
