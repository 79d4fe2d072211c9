// The way in: a strategy's name and a problem give a plan and its figures.
#pragma once

#include <string>

#include "planner/schedule.hpp"
#include "planner/types.hpp"

namespace hdp {

struct Answer {
  Plan plan;
  Schedule schedule;
  double total_compute_s = 0;
  double lower_bound_s = 0;
};

// Strategy is "static", "naive" or "dp-balance". Throws std::invalid_argument for a problem that
// has no plan and for an unknown strategy.
Answer make_plan(const Problem& problem, const std::string& strategy);

}  // namespace hdp
