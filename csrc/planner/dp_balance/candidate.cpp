#include "planner/dp_balance/candidate.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace hdp {
namespace {

// How long a sequence may take, as shares of a rank's time. The first one that serves has the
// least traffic.
constexpr double kShares[] = {1.0, 0.5, 0.25, 0.125};

// The same below rows of the longest sequences.
constexpr double kLayeredShares[] = {1.0, 0.5};

// With pipeline stages as well: alike times of all micro-batches count.
constexpr double kPipelineShares[] = {0.0625, 0.03125};

// Columns end this much above the bound; how long the rings may take that are no columns.
constexpr double kColumns[] = {1.0005, 1.004, 1.015};
constexpr double kColumnShare = 0.25;

// A search that begins this near to what is enough needs no other nesting.
constexpr double kGoodStart = 1.004;

constexpr double kNever = std::numeric_limits<double>::infinity();

// Which ranks form rings: all alike, or the fast ones, or ranks of alike speed.
std::vector<Decisions> ring_policies(const Problem& problem) {
  if (problem.speeds.empty()) return {{}};
  const auto [slowest, fastest] = std::minmax_element(problem.speeds.begin(), problem.speeds.end());
  if (*slowest == *fastest) return {{}};
  std::vector<Decisions> policies;
  for (const bool alike_speeds : {false, true}) {
    for (const double share : {0.95, 0.75, 0.0}) {
      policies.push_back({{}, false, share * *fastest, alike_speeds});
    }
  }
  return policies;
}

// All ranks that form rings, and the largest number of whole nodes that is a power of two; each
// with and without three quarters of blocks.
std::vector<Nesting> nestings(const Problem& problem, double least_speed) {
  int64_t all = problem.num_ranks;
  if (!problem.speeds.empty()) {
    all = std::count_if(problem.speeds.begin(), problem.speeds.end(),
                        [&](double speed) { return speed >= least_speed; });
  }
  int64_t nodes = problem.cost.ranks_per_node;
  while (2 * nodes <= all) nodes *= 2;
  if (nodes >= all) return {{all, false}, {all, true}};
  return {{all, false}, {all, true}, {nodes, false}, {nodes, true}};
}

std::vector<Degrees> first_degrees(const Batch& batch, const Nesting& nesting) {
  std::vector<Degrees> result;
  for (const double share : kShares) {
    result.push_back(balanced_degrees(batch, nesting, share * batch.share_s));
  }
  if (batch.ramp > 0) {
    for (const double share : kPipelineShares) {
      result.push_back(balanced_degrees(batch, nesting, share * batch.share_s));
    }
    return result;
  }
  for (const int64_t num_rows : {1, 2}) {
    for (const double share : kLayeredShares) {
      Degrees layered = layered_degrees(batch, nesting, num_rows, share);
      if (!layered.empty()) result.push_back(std::move(layered));
    }
  }
  return result;
}

}  // namespace

Candidate::Candidate(const Batch& batch, Decisions given)
    : decisions(std::move(given)),
      rings(place_rings(batch, decisions)),
      level(estimate(batch, decisions, rings)) {
  // ranks that wait have had other micro-batches before, which pipelines cannot run
  if (batch.ramp > 0 && !rings.gaps.empty()) level.makespan_s = kNever;
}

std::vector<Candidate> first_candidates(const Batch& batch, double enough_s) {
  std::vector<Candidate> candidates;
  const auto faster = [](const Candidate& left, const Candidate& right) {
    return left.level.makespan_s < right.level.makespan_s;
  };
  for (Decisions decisions : ring_policies(batch.problem)) {
    for (const Nesting& nesting : nestings(batch.problem, decisions.least_speed)) {
      for (Degrees& degrees : first_degrees(batch, nesting)) {
        decisions.degrees = std::move(degrees);
        candidates.emplace_back(batch, decisions);
        if (candidates.back().level.makespan_s <= enough_s) {
          std::swap(candidates.front(), candidates.back());
          return candidates;
        }
      }
      if (batch.ramp == 0) {
        for (const double over : kColumns) {
          decisions.column_s = over * batch.bound_s;
          decisions.degrees = balanced_degrees(batch, nesting, kColumnShare * batch.share_s);
          candidates.emplace_back(batch, decisions);
        }
        decisions.column_s = 0;
      }
      const auto fastest = std::min_element(candidates.begin(), candidates.end(), faster);
      if (fastest->level.makespan_s <= kGoodStart * enough_s) break;
    }
  }
  const double fastest_s =
      std::min_element(candidates.begin(), candidates.end(), faster)->level.makespan_s;
  const auto leanest = std::find_if(candidates.begin(), candidates.end(), [&](const auto& one) {
    return one.level.makespan_s <= kNearlyAsFast * fastest_s;
  });
  std::rotate(candidates.begin(), leanest, leanest + 1);
  std::stable_sort(candidates.begin() + 1, candidates.end(), faster);
  return candidates;
}

}  // namespace hdp
