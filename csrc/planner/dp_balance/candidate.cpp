#include "planner/dp_balance/candidate.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "planner/dp_balance/clock_heap.hpp"

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

// A start of at most so many ring members keeps its rings.
constexpr std::size_t kFewMembers = std::size_t{1} << 16;

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

// Calls `visit` with one choice of degrees after the other until it returns true; whether it did.
template <typename Visit>
bool any_of_first_degrees(const Batch& batch, const Nesting& nesting, const Visit& visit) {
  const auto balanced = [&](double share) {
    return visit(balanced_degrees(batch, nesting, share * batch.share_s));
  };
  if (std::any_of(std::begin(kShares), std::end(kShares), balanced)) return true;
  if (batch.ramp > 0) {
    return std::any_of(std::begin(kPipelineShares), std::end(kPipelineShares), balanced);
  }
  for (const int64_t num_rows : {1, 2}) {
    for (const double share : kLayeredShares) {
      Degrees layered = layered_degrees(batch, nesting, num_rows, share);
      if (!layered.empty() && visit(std::move(layered))) return true;
    }
  }
  return false;
}

DegreeRuns runs_of(const Degrees& degrees) {
  DegreeRuns runs;
  for (const int32_t degree : degrees) {
    if (runs.empty() || runs.back().first != degree) runs.emplace_back(degree, 0);
    ++runs.back().second;
  }
  return runs;
}

// Besides the degrees.
bool decide_alike(const Decisions& left, const Decisions& right) {
  return left.least_speed == right.least_speed && left.alike_speeds == right.alike_speeds &&
         left.column_s == right.column_s;
}

// Candidates made one after the other; different shares of the time often lead to the same one.
class Starts {
 public:
  explicit Starts(const Batch& batch) : batch_(batch) {}

  // Adds the start of these decisions.
  void add(const Decisions& policy, double column_s, Degrees degrees) {
    Start start;
    start.decisions = policy;
    start.decisions.column_s = column_s;
    start.degrees = runs_of(degrees);
    const auto same = std::find_if(starts_.begin(), starts_.end(), [&](const Start& known) {
      return decide_alike(known.decisions, start.decisions) && known.degrees == start.degrees;
    });
    if (same != starts_.end()) {
      start.makespan_s = same->makespan_s;
    } else {
      Decisions decisions = start.decisions;
      decisions.degrees = std::move(degrees);
      Candidate candidate(batch_, std::move(decisions));
      start.makespan_s = candidate.level.makespan_s;
      if (candidate.rings.ranks.size() <= kFewMembers) start.candidate = std::move(candidate);
    }
    starts_.push_back(std::move(start));
  }

  const Start& last() const { return starts_.back(); }

  double fastest_s() const {
    return std::min_element(starts_.begin(), starts_.end(), faster)->makespan_s;
  }

  std::vector<Start> take_last() { return {std::move(starts_.back())}; }

  std::vector<Start> take_all() {
    const double nearly_s = kNearlyAsFast * fastest_s();
    const auto leanest = std::find_if(starts_.begin(), starts_.end(),
                                      [&](const Start& one) { return one.makespan_s <= nearly_s; });
    std::rotate(starts_.begin(), leanest, leanest + 1);
    std::stable_sort(starts_.begin() + 1, starts_.end(), faster);
    return std::move(starts_);
  }

 private:
  static bool faster(const Start& left, const Start& right) {
    return left.makespan_s < right.makespan_s;
  }

  const Batch& batch_;
  std::vector<Start> starts_;
};

}  // namespace

Candidate::Candidate(const Batch& batch, Decisions given)
    : decisions(std::move(given)),
      rings(place_rings(batch, decisions)),
      level(estimate(batch, decisions, rings)) {
  // ranks that wait have had other micro-batches before, which pipelines cannot run
  if (batch.ramp > 0 && !rings.gaps.empty()) level.makespan_s = kInfinity;
}

Decisions decisions_of(const Start& start) {
  Decisions decisions = start.decisions;
  for (const auto& [degree, number] : start.degrees) {
    decisions.degrees.insert(decisions.degrees.end(), number, degree);
  }
  return decisions;
}

Candidate take_candidate(const Batch& batch, Start& start) {
  if (start.candidate) return *std::move(start.candidate);
  return Candidate(batch, decisions_of(start));
}

std::vector<Start> first_starts(const Batch& batch, double enough_s) {
  Starts starts(batch);
  for (const Decisions& policy : ring_policies(batch.problem)) {
    for (const Nesting& nesting : nestings(batch.problem, policy.least_speed)) {
      const auto is_enough = [&](Degrees degrees) {
        starts.add(policy, 0, std::move(degrees));
        return starts.last().makespan_s <= enough_s;
      };
      const auto column_is_enough = [&](double over) {
        starts.add(policy, over * batch.bound_s,
                   balanced_degrees(batch, nesting, kColumnShare * batch.share_s));
        return starts.last().makespan_s <= enough_s;
      };
      const bool columns_first = batch.ramp == 0 && width_costs(batch.problem.cost);
      if (columns_first && (is_enough(balanced_degrees(batch, nesting, batch.share_s)) ||
                            column_is_enough(kColumns[0]))) {
        return starts.take_last();
      }
      if (any_of_first_degrees(batch, nesting, is_enough)) return starts.take_last();
      if (batch.ramp == 0) {
        for (const double over : kColumns) column_is_enough(over);
      }
      if (starts.fastest_s() <= kGoodStart * enough_s) break;
    }
  }
  return starts.take_all();
}

Level estimate(const Batch& batch, const Decisions& decisions, const RingSchedule& schedule) {
  const Problem& problem = batch.problem;
  ClockHeap ranks(schedule.clocks);
  std::vector<int32_t> owners(batch.num_big, -1);
  for (std::size_t place = 0; place < batch.num_big; ++place) {
    if (is_ring(problem, batch.length(place), decisions.degrees[place])) continue;
    const double share_of_fixed = fixed_s(problem.cost, 1) *
                                  static_cast<double>(batch.length(place)) /
                                  static_cast<double>(problem.tokens_per_rank);
    const double speed = problem.speed(ranks.rank(0));
    owners[place] = ranks.rank(0);
    ranks.advance(0, ranks.clock(0) + (batch.compute_s(place) + share_of_fixed) / speed);
  }
  Level result;
  double latest = 0;
  double done = batch.small_s;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks.clock(i) > latest) {
      latest = ranks.clock(i);
      result.latest_rank = ranks.rank(i);
    }
    done += ranks.clock(i) * problem.speed(ranks.rank(i));
  }
  const double level = done / batch.total_speed;
  result.makespan_s = std::max(latest, level);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    result.excess_s += std::max(0.0, ranks.clock(i) - level);
  }
  for (std::size_t place = 0; place < owners.size(); ++place) {
    if (owners[place] == result.latest_rank) result.singles.push_back(place);
  }
  return result;
}

}  // namespace hdp
