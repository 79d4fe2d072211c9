#include "planner/dp_balance/dp_balance.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "planner/base/memory.hpp"
#include "planner/baselines/baselines.hpp"
#include "planner/bounds/bounds.hpp"
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

// The plans that may still be taken: a large batch has room for few in memory.
class Choice {
 public:
  double least_makespan_s() const { return least_s_; }

  // A plan that an earlier one beats in time and in traffic is dropped, and so is the earlier one.
  void offer(Scheduled plan) {
    const double makespan_s = plan.schedule.makespan_s;
    least_s_ = std::min(least_s_, makespan_s);
    for (const Scheduled& other : plans_) {
      if (other.schedule.makespan_s <= makespan_s && !leaner(plan, other)) return;
    }
    const auto beaten = [&](const Scheduled& other) {
      return other.schedule.makespan_s > kNearlyAsFast * least_s_ ||
             (makespan_s <= other.schedule.makespan_s && leaner(plan, other));
    };
    plans_.erase(std::remove_if(plans_.begin(), plans_.end(), beaten), plans_.end());
    if (makespan_s <= kNearlyAsFast * least_s_) plans_.push_back(std::move(plan));
  }

  // The leanest of those that are nearly as fast as the fastest and take at most `limit_s`.
  Scheduled take(double limit_s) {
    Scheduled* chosen = nullptr;
    for (Scheduled& plan : plans_) {
      if (plan.schedule.makespan_s > std::min(limit_s, kNearlyAsFast * least_s_)) continue;
      if (chosen == nullptr || leaner(plan, *chosen)) chosen = &plan;
    }
    return std::move(*chosen);
  }

 private:
  double least_s_ = kInfinity;
  std::vector<Scheduled> plans_;
};

// Offers the plans of dp-balance itself, which may begin with what is computed twice; returns the
// sequences, longest first.
std::vector<SequenceId> offer_own_plans(const Problem& problem, Choice& choice,
                                        bool twice = false) {
  Batch batch(problem, twice);
  Decisions decisions = best_decisions(batch);
  const auto offer = [&](RingSchedule rings, const PlaceSet& shorts) {
    Plan plan = place_shorts(batch, rings, shorts, {}, std::move(rings.locals));
    rings = RingSchedule();
    choice.offer(scheduled(problem, std::move(plan)));
  };
  offer(place_rings(batch, decisions), places_of_shorts(batch, decisions.degrees));
  if (problem.cost.g > 0) {
    decisions.fill_spare_room = true;
    RingSchedule rings = place_rings(batch, decisions);
    const PlaceSet shorts = std::move(rings.shorts);
    if (!rings.locals.sequences.empty()) offer(std::move(rings), shorts);
  }
  return std::move(batch.order);
}

// Offers the plans of the other strategies that are nearly as fast as the fastest, and perhaps
// slower ones; returns the least time that one of them takes.
double offer_other_plans(const Problem& problem, const std::vector<SequenceId>& order,
                         Choice& choice) {
  const double limit_s = kNearlyAsFast * choice.least_makespan_s();
  double least_s = kInfinity;
  const auto offer = [&](Plan plan) {
    Scheduled made = scheduled(problem, std::move(plan));
    least_s = std::min(least_s, made.schedule.makespan_s);
    choice.offer(std::move(made));
  };
  if (auto plan = naive_within(problem, order, limit_s)) offer(std::move(*plan));
  if (static_mesh_bound_s(problem) <= limit_s) offer(static_mesh(problem));
  return least_s;
}

// Streams and recomputation where no ring serves, and where plans that begin with them are faster.
Scheduled with_forwards_twice(const Problem& problem) {
  Choice choice;
  if (rings_hold_all(problem)) {
    Problem whole = problem;
    whole.streams = whole.recompute = false;
    choice.offer(dp_balance(whole));
  } else {
    offer_own_plans(problem, choice);
  }
  if (choice.least_makespan_s() > kNearlyAsFast * tight_bound_s(problem)) {
    offer_own_plans(problem, choice, true);
  }
  return choice.take(kInfinity);
}

}  // namespace

Plan first_draft(const Batch& batch) {
  const Decisions decisions = best_decisions(batch);
  RingSchedule rings = place_rings(batch, decisions);
  const PlaceSet shorts = places_of_shorts(batch, decisions.degrees);
  return place_shorts(batch, rings, shorts, {}, std::move(rings.locals));
}

Scheduled dp_balance(const Problem& problem) {
  if (may_compute_twice(problem)) return with_forwards_twice(problem);
  Choice choice;
  const std::vector<SequenceId> order = offer_own_plans(problem, choice);
  const double slowest_s = kRounding * offer_other_plans(problem, order, choice);
  return choice.take(slowest_s);
}

}  // namespace hdp
