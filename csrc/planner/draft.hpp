// A plan together with the decisions that made it and what it costs.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/degrees.hpp"
#include "planner/schedule.hpp"
#include "planner/types.hpp"

namespace hdp {

// What dp-balance decides freely; everything else follows by list scheduling.
struct Decisions {
  Degrees degrees;
  bool fill_spare_room = false;  // put whole short sequences on ring members
};

struct Draft {
  Decisions decisions;  // no degrees: another strategy's plan
  Plan plan;
  Schedule schedule;
};

// `order` holds all sequence ids, longest first.
Draft draft(const Problem& problem, const std::vector<int64_t>& order, Decisions decisions);

// Another strategy's plan as a draft.
Draft draft_of(const Problem& problem, Plan plan);

// The draft with the least makespan; of equals the first.
const Draft& fastest(const std::vector<Draft>& drafts);

// The leanest of the drafts that take at most `limit_s`, which at least one must: the least ring
// traffic, then the fewest micro-batches, then the first.
const Draft& leanest(const std::vector<Draft>& drafts, double limit_s);

}  // namespace hdp
