#include "planner/dp_balance/decide.hpp"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "planner/dp_balance/candidate.hpp"
#include "planner/dp_balance/degree_search.hpp"

namespace hdp {
namespace {

// Of the bound: a plan this fast is not worth more search.
constexpr double kCloseEnough = 1.001;

// Of the bound, however much blocks may take: where they take most, other degrees save some.
constexpr double kMostEnough = 1.05;

// Ring members, ranks and big sequences that the search may look at, for effort 1: about a
// millisecond for 64 ranks, five for 1,024.
constexpr int64_t kSearchWork = 12000;
constexpr int64_t kSearchWorkPerRank = 100;

// More changes help little where few ranks make them cheap.
constexpr int64_t kMostTries = 64;

int64_t search_tries(const Batch& batch, const Decisions& decisions) {
  const int64_t num_ranks = batch.problem.num_ranks;
  int64_t one_try = num_ranks + static_cast<int64_t>(batch.num_big);
  for (const int64_t degree : decisions.degrees) one_try += degree > 1 ? degree : 0;
  const int64_t tries = (kSearchWork + kSearchWorkPerRank * num_ranks) / one_try;
  return batch.problem.effort * std::clamp<int64_t>(tries, 1, kMostTries);
}

// What blocks and merging of rings take that are just wide enough for memory and for a rank's time.
double blocks_s(const Batch& batch) {
  const CostModel& cost = batch.problem.cost;
  if (cost.block_all_layers_s == 0 && cost.merge_b == 0) return 0;
  double all_s = 0;
  for (std::size_t place = 0; place < batch.num_big; ++place) {
    const double in_time = std::ceil(batch.compute_s(place) / batch.share_s);
    const double degree = std::max(static_cast<double>(batch.least[place]), in_time);
    if (degree == 1) continue;
    all_s += degree * degree * cost.block_all_layers_s +
             (degree - 1) * cost.merge_b * static_cast<double>(batch.length(place));
  }
  return all_s / batch.total_speed;
}

// A makespan that is not worth more search. The bound leaves out hops, and blocks and merging
// beyond what memory demands: without a tolerance the search would run to its end where these cost
// something.
double enough(const Batch& batch) {
  const double tolerance = width_costs(batch.problem.cost) ? kNearlyAsFast : kCloseEnough;
  return std::min(kMostEnough * batch.bound_s, tolerance * batch.bound_s + blocks_s(batch));
}

}  // namespace

Decisions best_decisions(const Batch& batch) {
  const double enough_s = enough(batch);
  std::vector<Start> starts = first_starts(batch, enough_s);
  if (starts.front().makespan_s <= enough_s) return decisions_of(starts.front());
  Candidate first = take_candidate(batch, starts.front());
  int64_t num_tries = search_tries(batch, first.decisions);
  Candidate best = search_degrees(batch, std::move(first), enough_s, num_tries);
  for (std::size_t i = 1; i < starts.size() && num_tries > 0; ++i) {
    if (best.level.makespan_s <= enough_s) break;
    Candidate other = search_degrees(batch, take_candidate(batch, starts[i]), enough_s, num_tries);
    if (other.level.makespan_s * kNearlyAsFast < best.level.makespan_s) best = std::move(other);
  }
  return std::move(best.decisions);
}

}  // namespace hdp
