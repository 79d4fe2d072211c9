// dp-balance: the decisions, from first candidates and a search.
#pragma once

#include "planner/rings/batch.hpp"
#include "planner/rings/rings.hpp"

namespace hdp {

// The decisions with the least estimated makespan that were found; of those nearly as fast the ones
// found first, which have less ring traffic.
Decisions best_decisions(const Batch& batch);

}  // namespace hdp
