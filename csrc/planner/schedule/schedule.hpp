// The time a plan takes: what the strategies compare their candidates by.
#pragma once

#include <vector>

#include "planner/base/types.hpp"
#include "planner/schedule/loads.hpp"

namespace hdp {

// Runs the micro-batches in launch order: the members of a ring wait for each other at the start,
// and all of them take the time of the slowest. With pipeline stages, the exact 1F1B schedule.
Schedule simulate(const Problem& problem, const Plan& plan);

// When each rank is free then, without pipeline stages.
std::vector<double> rank_ends(const Problem& problem, const Plan& plan);

// As simulate(), for problem.pipeline_stages > 1; in lockstep where ranks share experts. Throws
// std::invalid_argument for a plan with a misplaced micro-batch, which may run into a deadlock.
Schedule simulate_pipeline(const Problem& problem, const Plan& plan);

struct Scheduled {
  Plan plan;
  Schedule schedule;
};

Scheduled scheduled(const Problem& problem, Plan plan);

}  // namespace hdp
