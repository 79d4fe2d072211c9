#include "planner/planner.hpp"

#include <stdexcept>
#include <utility>

#include "planner/base/check.hpp"
#include "planner/base/cost_model.hpp"
#include "planner/baselines/baselines.hpp"
#include "planner/bounds/bounds.hpp"
#include "planner/dp_balance/dp_balance.hpp"
#include "planner/ep_balance/ep_balance.hpp"
#include "planner/pp_balance/pp_balance.hpp"
#include "planner/schedule/lockstep.hpp"

namespace hdp {
namespace {

// With the time of ranks that wait for each other at every position where they share experts.
Scheduled judged(const Problem& problem, Plan plan) {
  if (problem.expert_ranks == 1 || problem.pipeline_stages > 1) {
    return scheduled(problem, std::move(plan));
  }
  const Schedule schedule = simulate_lockstep(problem, plan);
  return {std::move(plan), schedule};
}

Scheduled run(const Problem& problem, const std::string& strategy) {
  if (strategy == "static") return judged(problem, static_mesh(problem));
  if (strategy == "naive") return judged(problem, naive(problem));
  if (strategy == "bytescale") return judged(problem, bytescale(problem));
  if (strategy == "dynamic-cp") return judged(problem, dynamic_cp(problem));
  if (strategy == "dp-balance") {
    Scheduled made = dp_balance(problem);
    return problem.expert_ranks == 1 ? made : judged(problem, std::move(made.plan));
  }
  if (strategy == "pp-balance") return judged(problem, pp_balance(problem));
  if (strategy == "ep-balance") return judged(problem, ep_balance(problem));
  throw std::invalid_argument("strategy is '" + strategy +
                              "'; expected static, naive, bytescale, dynamic-cp, dp-balance, "
                              "pp-balance or ep-balance");
}

}  // namespace

Answer make_plan(const Problem& problem, const std::string& strategy) {
  check(problem);
  Answer answer;
  Scheduled made = run(problem, strategy);
  answer.plan = std::move(made.plan);
  answer.schedule = made.schedule;
  answer.perfect_s = total_compute_s(problem) / total_speed(problem);
  // a sequence's own time is less where others compute its experts
  answer.lower_bound_s = problem.expert_ranks > 1 ? answer.perfect_s : lower_bound_s(problem);
  return answer;
}

double checked_tight_bound_s(const Problem& problem) {
  check(problem);
  return tight_bound_s(problem);
}

}  // namespace hdp
