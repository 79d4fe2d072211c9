#include "planner/dp_balance/dp_balance.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "planner/base/check.hpp"
#include "planner/baselines/baselines.hpp"
#include "planner/dp_balance/candidate.hpp"
#include "planner/dp_balance/decide.hpp"
#include "planner/dp_balance/shorts.hpp"
#include "planner/rings/batch.hpp"

namespace hdp {
namespace {

// Of the other strategies, which get no tolerance: the same terms summed in another order.
constexpr double kRounding = 1 + 1e-12;

bool leaner(const Scheduled& left, const Scheduled& right) {
  return std::make_pair(left.schedule.ring_tokens, left.plan.num_micro_batches()) <
         std::make_pair(right.schedule.ring_tokens, right.plan.num_micro_batches());
}

Scheduled draft(const Batch& batch, const Decisions& decisions) {
  const RingSchedule rings = place_rings(batch, decisions);
  const std::vector<std::size_t> shorts =
      decisions.fill_spare_room ? rings.shorts : places_of_shorts(batch, decisions.degrees);
  return scheduled(batch.problem, place_shorts(batch, rings, shorts));
}

// The plans of dp-balance itself.
std::vector<Scheduled> own_plans(const Batch& batch) {
  Decisions decisions = best_decisions(batch);
  std::vector<Scheduled> plans{draft(batch, decisions)};
  if (batch.problem.cost.g > 0) {
    decisions.fill_spare_room = true;
    plans.push_back(draft(batch, decisions));
  }
  return plans;
}

// The plans of the other strategies that take at most `limit_s`, and perhaps slower ones.
std::vector<Scheduled> other_plans(const Batch& batch, double limit_s) {
  const Problem& problem = batch.problem;
  std::vector<Scheduled> plans;
  if (auto plan = naive_within(problem, batch.order, limit_s)) {
    plans.push_back(scheduled(problem, std::move(*plan)));
  }
  if (static_mesh_bound_s(problem) <= limit_s) {
    plans.push_back(scheduled(problem, static_mesh(problem)));
  }
  return plans;
}

double least_makespan_s(const std::vector<Scheduled>& plans) {
  double least = std::numeric_limits<double>::infinity();
  for (const Scheduled& plan : plans) least = std::min(least, plan.schedule.makespan_s);
  return least;
}

}  // namespace

Scheduled dp_balance(const Problem& problem) {
  const Batch batch(problem);
  std::vector<Scheduled> plans = own_plans(batch);
  std::vector<Scheduled> others = other_plans(batch, kNearlyAsFast * least_makespan_s(plans));
  const double slowest_s = kRounding * least_makespan_s(others);
  std::move(others.begin(), others.end(), std::back_inserter(plans));
  const double limit_s = std::min(kNearlyAsFast * least_makespan_s(plans), slowest_s);
  Scheduled* chosen = nullptr;
  for (Scheduled& plan : plans) {
    if (plan.schedule.makespan_s > limit_s) continue;
    if (chosen == nullptr || leaner(plan, *chosen)) chosen = &plan;
  }
  return std::move(*chosen);
}

}  // namespace hdp
