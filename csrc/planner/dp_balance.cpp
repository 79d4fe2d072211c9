#include <utility>

#include "planner/check.hpp"
#include "planner/cost_model.hpp"
#include "planner/rings.hpp"
#include "planner/schedule.hpp"
#include "planner/shorts.hpp"
#include "planner/sorting.hpp"
#include "planner/strategies.hpp"

namespace hdp {
namespace {

// Keeps the plan with the least makespan; of equals the first.
class Fastest {
 public:
  explicit Fastest(const Problem& problem) : problem_(problem) {}

  void offer(Plan plan) {
    const double makespan_s = simulate(problem_, plan).makespan_s;
    if (plan_.num_micro_batches() > 0 && makespan_s >= makespan_s_) return;
    plan_ = std::move(plan);
    makespan_s_ = makespan_s;
  }

  double makespan_s() const { return makespan_s_; }

  Plan take() { return std::move(plan_); }

 private:
  const Problem& problem_;
  Plan plan_;
  double makespan_s_ = 0;
};

}  // namespace

Plan dp_balance(const Problem& problem) {
  constexpr double kCloseEnough = 1.002;  // of the bound: thinner rings would only cost traffic
  const double share_s = total_compute_s(problem) / static_cast<double>(problem.num_ranks);
  const std::vector<int64_t> order = longest_first(problem.lengths);
  const double enough_s = kCloseEnough * lower_bound_s(problem);
  Fastest fastest(problem);
  for (const double longest : {1.0, 0.5, 0.25}) {
    fastest.offer(place_shorts(problem, place_rings(problem, order, {longest * share_s, false})));
    if (problem.cost.g > 0) {
      fastest.offer(place_shorts(problem, place_rings(problem, order, {longest * share_s, true})));
    }
    if (fastest.makespan_s() <= enough_s) break;
  }
  fastest.offer(naive(problem));
  if (static_degree(problem) > 0) fastest.offer(static_mesh(problem));
  return fastest.take();
}

}  // namespace hdp
