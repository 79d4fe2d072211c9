#include "planner/draft.hpp"

#include <algorithm>
#include <utility>

#include "planner/rings.hpp"
#include "planner/shorts.hpp"

namespace hdp {

Draft draft(const Problem& problem, const std::vector<int64_t>& order, Decisions decisions) {
  Draft result;
  result.plan = place_shorts(
      problem, place_rings(problem, order, decisions.degrees, decisions.fill_spare_room));
  result.schedule = simulate(problem, result.plan);
  result.decisions = std::move(decisions);
  return result;
}

Draft draft_of(const Problem& problem, Plan plan) {
  Draft result;
  result.schedule = simulate(problem, plan);
  result.plan = std::move(plan);
  return result;
}

const Draft& fastest(const std::vector<Draft>& drafts) {
  return *std::min_element(drafts.begin(), drafts.end(), [](const Draft& left, const Draft& right) {
    return left.schedule.makespan_s < right.schedule.makespan_s;
  });
}

const Draft& leanest(const std::vector<Draft>& drafts, double limit_s) {
  const auto cost = [](const Draft& draft) {
    return std::make_pair(draft.schedule.ring_tokens, draft.plan.num_micro_batches());
  };
  const Draft* best = nullptr;
  for (const Draft& candidate : drafts) {
    if (candidate.schedule.makespan_s > limit_s) continue;
    if (best == nullptr || cost(candidate) < cost(*best)) best = &candidate;
  }
  return *best;
}

}  // namespace hdp
