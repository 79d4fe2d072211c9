// The way into dp-balance.
#pragma once

#include "planner/base/types.hpp"
#include "planner/rings/batch.hpp"
#include "planner/schedule/schedule.hpp"

namespace hdp {

// Equalises the ranks' times with as little ring traffic as that allows. Of its own drafts and the
// other two strategies' plans it takes one that simulate() finds no slower than either of those two
// and nearly as fast as the fastest: of these the one with the least ring traffic.
Scheduled dp_balance(const Problem& problem);

// The first of its own drafts, which is not simulated, and not compared with other plans.
Plan first_draft(const Batch& batch);

}  // namespace hdp
