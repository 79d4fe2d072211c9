#include "planner/round_balance/round_balance.hpp"

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

void keep_better(const Problem& problem, Plan plan, Scheduled& best) {
  Scheduled found = scheduled(problem, std::move(plan));
  if (found.schedule.makespan_s < best.schedule.makespan_s) best = std::move(found);
}

}  // namespace

Plan round_balance(const Problem& problem) {
  require_powers_hold(problem);
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
    keep_better(problem, dynamic_cp(problem), best);
  }
  return std::move(best.plan);
}

}  // namespace hdp
