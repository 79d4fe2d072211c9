#include "planner/round_balance/round_balance.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "planner/base/cost_model.hpp"
#include "planner/base/sorting.hpp"
#include "planner/baselines/baselines.hpp"
#include "planner/round_balance/dealing.hpp"
#include "planner/round_balance/rounds.hpp"
#include "planner/schedule/schedule.hpp"

namespace hdp {
namespace {

// So near to all ranks busy to the end no other plan is looked at.
constexpr double kNear = 1.005;

// Whether every rank runs a multiple of what a stage runs of one model chunk before the next.
bool is_grouped(const Problem& problem, const Plan& plan) {
  const auto rounds = std::count(plan.ranks.begin(), plan.ranks.end(), 0);
  return rounds % group_size(problem) == 0;
}

void keep_better(const Problem& problem, Plan plan, Scheduled& best) {
  Scheduled found = scheduled(problem, std::move(plan));
  if (found.schedule.makespan_s < best.schedule.makespan_s) best = std::move(found);
}

}  // namespace

Plan round_balance(const Problem& problem) {
  require_powers_hold(problem, "round-balance");
  const std::vector<SequenceId> order = longest_first(problem.lengths);
  Scheduled best;
  best.schedule.makespan_s = kInfinity;
  BlockRounds rounds(problem, dealt(problem, order));
  if (rounds.level(group_size(problem))) {
    keep_better(problem, rounds.plan(true), best);
    if (problem.pipeline_stages > 1) keep_better(problem, rounds.plan(false), best);
  }
  const double perfect_s = total_compute_s(problem) / total_speed(problem) /
                           static_cast<double>(problem.pipeline_stages);
  if (best.schedule.makespan_s > kNear * perfect_s) {
    Plan other = dynamic_cp(problem);
    if (best.schedule.makespan_s == kInfinity || is_grouped(problem, other)) {
      keep_better(problem, std::move(other), best);
    }
  }
  return std::move(best.plan);
}

}  // namespace hdp
