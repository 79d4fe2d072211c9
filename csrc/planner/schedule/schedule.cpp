#include "planner/schedule/schedule.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "planner/schedule/lockstep.hpp"
#include "planner/schedule/pipeline.hpp"

namespace hdp {
namespace {

// Moves the ranks' clocks.
Schedule run(const Problem& problem, const Plan& plan, std::vector<double>& clocks) {
  Schedule schedule;
  for (int64_t m = 0; m < plan.num_micro_batches(); ++m) {
    const MicroBatchLoad load = micro_batch_load(problem, plan, m);
    const auto first = plan.ranks.begin() + plan.rank_offsets[index(m)];
    const auto last = plan.ranks.begin() + plan.rank_offsets[index(m) + 1];
    double start = 0;
    std::for_each(first, last, [&](int32_t rank) { start = std::max(start, clocks[index(rank)]); });
    const double end = start + load.seconds;
    std::for_each(first, last, [&](int32_t rank) { clocks[index(rank)] = end; });
    schedule.makespan_s = std::max(schedule.makespan_s, end);
    schedule.ring_tokens += load.ring_tokens;
    schedule.max_tokens_on_a_rank = std::max(schedule.max_tokens_on_a_rank, load.tokens_on_a_rank);
  }
  return schedule;
}

}  // namespace

Schedule simulate(const Problem& problem, const Plan& plan) {
  if (problem.pipeline_stages > 1) return simulate_pipeline(problem, plan);
  std::vector<double> clocks(index(problem.num_ranks), 0.0);
  return run(problem, plan, clocks);
}

std::vector<double> rank_ends(const Problem& problem, const Plan& plan) {
  std::vector<double> clocks(index(problem.num_ranks), 0.0);
  run(problem, plan, clocks);
  return clocks;
}

Schedule simulate_pipeline(const Problem& problem, const Plan& plan) {
  const int64_t misplaced = first_misplaced(problem, plan);
  if (misplaced >= 0) {
    throw std::invalid_argument(
        "micro-batch " + std::to_string(misplaced) +
        " stands at different positions in its ranks' lists and may run into a deadlock with " +
        std::to_string(problem.pipeline_stages) + " pipeline stages: use strategy pp-balance");
  }
  if (problem.expert_ranks > 1) return simulate_lockstep(problem, plan);
  Schedule schedule;
  std::vector<double> seconds;
  for (int64_t m = 0; m < plan.num_micro_batches(); ++m) {
    const MicroBatchLoad load = micro_batch_load(problem, plan, m);
    seconds.push_back(load.seconds);
    schedule.ring_tokens += load.ring_tokens;
    schedule.max_tokens_on_a_rank = std::max(schedule.max_tokens_on_a_rank, load.tokens_on_a_rank);
  }
  const std::vector<double> ends = pipeline_ends(problem, plan.rank_offsets, plan.ranks,
                                                 seconds, problem.num_ranks);
  schedule.makespan_s = *std::max_element(ends.begin(), ends.end());
  return schedule;
}

Scheduled scheduled(const Problem& problem, Plan plan) {
  const Schedule schedule = simulate(problem, plan);
  return {std::move(plan), schedule};
}

}  // namespace hdp
