#include "planner/planner.hpp"

#include <stdexcept>
#include <utility>

#include "planner/bounds.hpp"
#include "planner/check.hpp"
#include "planner/cost_model.hpp"
#include "planner/sorting.hpp"
#include "planner/strategies.hpp"

namespace hdp {
namespace {

Scheduled run(const Problem& problem, const std::string& strategy) {
  if (strategy == "static") return scheduled(problem, static_mesh(problem));
  if (strategy == "naive") return scheduled(problem, naive(problem));
  if (strategy == "bytescale") return scheduled(problem, bytescale(problem));
  if (strategy == "dp-balance") return dp_balance(problem);
  if (strategy == "pp-balance") return scheduled(problem, pp_balance(problem));
  throw std::invalid_argument("strategy is '" + strategy +
                              "'; expected static, naive, bytescale, dp-balance or pp-balance");
}

}  // namespace

Answer make_plan(const Problem& problem, const std::string& strategy) {
  check(problem);
  Answer answer;
  Scheduled made = run(problem, strategy);
  answer.plan = std::move(made.plan);
  answer.schedule = made.schedule;
  answer.perfect_s = total_compute_s(problem) / total_speed(problem);
  answer.lower_bound_s = lower_bound_s(problem);
  return answer;
}

double checked_tight_bound_s(const Problem& problem) {
  check(problem);
  return tight_bound_s(problem, longest_first(problem.lengths));
}

}  // namespace hdp
