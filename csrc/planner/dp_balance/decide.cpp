#include "planner/dp_balance/decide.hpp"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

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

// A change that gains less than this share of the makespan is not worth a wider ring.
constexpr double kLeastGain = 1e-5;

bool better(const Level& left, const Level& right) {
  const double gain = right.makespan_s - left.makespan_s;
  const double least = kLeastGain * right.makespan_s;
  if (gain >= least) return true;
  return gain > -1e-12 * right.makespan_s && left.excess_s < right.excess_s * (1 - 1e-3);
}

// Places of the sequences on the rank that ends last, then of those that are waited for most.
std::vector<std::size_t> in_the_way(const Candidate& candidate) {
  constexpr std::size_t kMostWaited = 4;
  const RingSchedule& rings = candidate.rings;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < rings.places.size(); ++i) {
    if (std::binary_search(at(rings.ranks, rings.offsets[i]), at(rings.ranks, rings.offsets[i + 1]),
                           candidate.level.latest_rank)) {
      places.push_back(rings.places[i]);
    }
  }
  places.insert(places.end(), candidate.level.singles.begin(), candidate.level.singles.end());
  std::vector<std::pair<double, std::size_t>> waited;  // (-seconds, place)
  for (const Gap& gap : rings.gaps) {
    const std::size_t place = rings.places[gap.ring];
    if (waited.empty() || waited.back().second != place) waited.emplace_back(0, place);
    waited.back().first -= gap.seconds;
  }
  std::sort(waited.begin(), waited.end());
  for (std::size_t i = 0; i < std::min(kMostWaited, waited.size()); ++i) {
    places.push_back(waited[i].second);
  }
  return places;
}

std::vector<int64_t> other_degrees(const Batch& batch, std::size_t place, int64_t degree) {
  const int64_t num_ranks = batch.problem.num_ranks;
  std::vector<int64_t> result;
  for (const int64_t other : {2 * degree, degree / 2, degree * 4 / 3, degree * 3 / 4,
                              degree * 3 / 2, degree * 2 / 3, degree + 1, degree - 1, num_ranks}) {
    const bool seen = std::find(result.begin(), result.end(), other) != result.end();
    if (other != degree && !seen && other >= 1 &&
        may_share(batch.problem, batch.length(place), batch.least[place], other)) {
      result.push_back(other);
    }
  }
  return result;
}

// The first change that makes the candidate better, if one is found.
bool improve(const Batch& batch, Candidate& candidate, int64_t& num_tries) {
  for (const std::size_t place : in_the_way(candidate)) {
    const int64_t degree = candidate.decisions.degrees[place];
    for (const int64_t other : other_degrees(batch, place, degree)) {
      if (num_tries <= 0) return false;
      --num_tries;
      Decisions changed = candidate.decisions;
      changed.degrees[place] = static_cast<int32_t>(other);
      Candidate next(batch, std::move(changed));
      if (!better(next.level, candidate.level)) continue;
      candidate = std::move(next);
      return true;
    }
  }
  return false;
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

Candidate search_degrees(const Batch& batch, Candidate candidate, double enough_s,
                         int64_t& num_tries) {
  while (candidate.level.makespan_s > enough_s && improve(batch, candidate, num_tries)) {
  }
  return candidate;
}

}  // namespace hdp
