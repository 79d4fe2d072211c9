#include <algorithm>
#include <iterator>
#include <utility>

#include "planner/check.hpp"
#include "planner/cost_model.hpp"
#include "planner/degree_search.hpp"
#include "planner/draft.hpp"
#include "planner/sorting.hpp"
#include "planner/strategies.hpp"

namespace hdp {
namespace {

// Of the lower bound: a plan this fast is not worth more drafts.
constexpr double kCloseEnough = 1.002;

// Of the fastest draft: a cost model does not tell apart what differs by less, whereas ring traffic
// costs energy and other jobs' bandwidth even where it is hidden.
constexpr double kTolerance = 1.005;

// Of the other strategies, which get no tolerance: the same terms summed in another order.
constexpr double kRounding = 1 + 1e-12;

double least_makespan_s(const std::vector<Draft>& drafts) {
  return fastest(drafts).schedule.makespan_s;
}

// Degrees that leave no sequence more than a share of the time that a rank has.
std::vector<Draft> balanced_drafts(const Problem& problem, const std::vector<int64_t>& order,
                                   double enough_s) {
  const double share_s = total_compute_s(problem) / static_cast<double>(problem.num_ranks);
  const Degrees coarse = balanced_degrees(problem, share_s);
  std::vector<Draft> drafts;
  const auto add = [&](const Degrees& degrees) {
    drafts.push_back(draft(problem, order, {degrees, false}));
    if (problem.cost.g > 0) drafts.push_back(draft(problem, order, {degrees, true}));
    return least_makespan_s(drafts) <= enough_s;
  };
  if (add(coarse)) return drafts;
  const Degrees wide = widened(problem, coarse);
  if (wide != coarse && add(wide)) return drafts;
  for (const double longest : {0.5, 0.25}) {
    if (add(balanced_degrees(problem, longest * share_s))) break;
  }
  return drafts;
}

std::vector<Draft> other_strategies(const Problem& problem) {
  std::vector<Draft> drafts{draft_of(problem, naive(problem))};
  if (static_degree(problem) > 0) drafts.push_back(draft_of(problem, static_mesh(problem)));
  return drafts;
}

}  // namespace

Plan dp_balance(const Problem& problem) {
  const std::vector<int64_t> order = longest_first(problem.lengths);
  const double enough_s = kCloseEnough * lower_bound_s(problem);
  std::vector<Draft> drafts = balanced_drafts(problem, order, enough_s);
  Draft improved = fastest(drafts);
  speed_up(problem, order, enough_s, improved);
  drafts.push_back(std::move(improved));

  std::vector<Draft> others = other_strategies(problem);
  const double slowest_s = kRounding * least_makespan_s(others);
  std::move(others.begin(), others.end(), std::back_inserter(drafts));
  const double limit_s = std::min(kTolerance * least_makespan_s(drafts), slowest_s);
  Draft chosen = leanest(drafts, limit_s);
  const bool is_ours = !chosen.decisions.degrees.empty();
  if (is_ours) save_traffic(problem, order, limit_s, chosen);
  return std::move(chosen.plan);
}

}  // namespace hdp
