#include "planner/planner.hpp"

#include <stdexcept>

#include "planner/check.hpp"
#include "planner/cost_model.hpp"
#include "planner/strategies.hpp"

namespace hdp {
namespace {

Plan run(const Problem& problem, const std::string& strategy) {
  if (strategy == "static") return static_mesh(problem);
  if (strategy == "naive") return naive(problem);
  if (strategy == "dp-balance") return dp_balance(problem);
  throw std::invalid_argument("strategy is '" + strategy +
                              "'; expected static, naive or dp-balance");
}

}  // namespace

Answer make_plan(const Problem& problem, const std::string& strategy) {
  check(problem);
  Answer answer;
  answer.plan = run(problem, strategy);
  answer.schedule = simulate(problem, answer.plan);
  answer.total_compute_s = total_compute_s(problem);
  answer.lower_bound_s = lower_bound_s(problem);
  return answer;
}

}  // namespace hdp
