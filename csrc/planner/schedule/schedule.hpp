// The time a plan takes: what the strategies compare their candidates by.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "planner/base/types.hpp"

namespace hdp {

struct Schedule {
  double makespan_s = 0;
  double ring_tokens = 0;  // tokens that cross from one rank to the next, forward
  int64_t max_tokens_on_a_rank = 0;
  // In lockstep:
  int64_t num_positions = 0;  // of the longest list
  double padding_share = 0;   // of the places in all lists
};

// One micro-batch by itself.
struct MicroBatchLoad {
  double seconds = 0;            // of its slowest member
  double ring_tokens = 0;        // as in Schedule
  int64_t tokens_on_a_rank = 0;  // padded, of its fullest member
};

MicroBatchLoad micro_batch_load(const Problem& problem, const Plan& plan, int64_t micro_batch);

// Calls visit(m, seconds) for each micro-batch; what they add up to, times left out.
template <typename Visit>
Schedule sum_of_loads(const Problem& problem, const Plan& plan, const Visit& visit) {
  Schedule schedule;
  for (int64_t m = 0; m < plan.num_micro_batches(); ++m) {
    const MicroBatchLoad load = micro_batch_load(problem, plan, m);
    visit(m, load.seconds);
    schedule.ring_tokens += load.ring_tokens;
    schedule.max_tokens_on_a_rank = std::max(schedule.max_tokens_on_a_rank, load.tokens_on_a_rank);
  }
  return schedule;
}

// Runs the micro-batches in launch order: the members of a ring wait for each other at the start,
// and all of them take the time of the slowest. With pipeline stages, the exact 1F1B schedule.
Schedule simulate(const Problem& problem, const Plan& plan);

// When each rank is free then, without pipeline stages.
std::vector<double> rank_ends(const Problem& problem, const Plan& plan);

// As simulate(), for problem.pipeline_stages > 1; in lockstep where ranks share experts. Throws
// std::invalid_argument for a plan with a misplaced micro-batch, which may run into a deadlock.
Schedule simulate_pipeline(const Problem& problem, const Plan& plan);

// The same of a plan without one, and when each rank ends; experts are not shared.
struct PipelineRun {
  Schedule schedule;
  std::vector<double> ends;
};

PipelineRun run_pipeline(const Problem& problem, const Plan& plan);

struct Scheduled {
  Plan plan;
  Schedule schedule;
};

Scheduled scheduled(const Problem& problem, Plan plan);

}  // namespace hdp
