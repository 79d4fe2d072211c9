// The way in: a strategy's name and a problem give a plan and its figures.
#pragma once

#include <string>
#include <vector>

#include "planner/base/types.hpp"
#include "planner/schedule/schedule.hpp"

namespace hdp {

struct Answer {
  Plan plan;
  Schedule schedule;
  double perfect_s = 0;  // total compute / sum of speeds
  double lower_bound_s = 0;
};

// The names of all strategies.
std::vector<std::string> strategies();

// Plans by one of them. With problem.expert_ranks > 1 the schedule is that of lockstep.
// Throws std::invalid_argument for a problem that has no plan, an unknown strategy, and a plan that
// pipeline stages could block.
Answer make_plan(const Problem& problem, const std::string& strategy);

// tight_bound_s of a problem that is checked first; throws the same.
double checked_tight_bound_s(const Problem& problem);

}  // namespace hdp
