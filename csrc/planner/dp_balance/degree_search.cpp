#include "planner/dp_balance/degree_search.hpp"

#include <algorithm>
#include <utility>

namespace hdp {
namespace {

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
    const auto begin = rings.ranks.begin() + static_cast<std::ptrdiff_t>(rings.offsets[i]);
    const auto end = rings.ranks.begin() + static_cast<std::ptrdiff_t>(rings.offsets[i + 1]);
    if (std::binary_search(begin, end, candidate.level.latest_rank)) {
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

Candidate search_degrees(const Batch& batch, Candidate candidate, double enough_s,
                         int64_t& num_tries) {
  while (candidate.level.makespan_s > enough_s && improve(batch, candidate, num_tries)) {
  }
  return candidate;
}

}  // namespace hdp
