#include <algorithm>
#include <cmath>
#include <optional>
#include <queue>

#include "planner/base/cost_model.hpp"
#include "planner/base/memory.hpp"
#include "planner/base/slices.hpp"
#include "planner/base/sorting.hpp"
#include "planner/baselines/baselines.hpp"
#include "planner/baselines/packing.hpp"
#include "planner/schedule/schedule.hpp"

namespace hdp {
namespace {

// Hands out the ranks with the fewest micro-batches; of equals those with the lower index.
class FewestMicroBatches {
 public:
  explicit FewestMicroBatches(int64_t num_ranks) {
    for (int64_t rank = 0; rank < num_ranks; ++rank) queue_.push({0, static_cast<int32_t>(rank)});
  }

  std::vector<int32_t> take(int64_t degree) {
    std::vector<Entry> taken;
    for (int64_t i = 0; i < degree; ++i) {
      taken.push_back(queue_.top());
      queue_.pop();
    }
    std::vector<int32_t> ranks;
    for (const Entry& entry : taken) {
      ranks.push_back(entry.second);
      queue_.push({entry.first + 1, entry.second});
    }
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }

 private:
  using Entry = std::pair<int64_t, int32_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> queue_;
};

// Whether the rings alone take more than `limit_s`, or all ranks on average once the rest, short
// sequences of so many seconds, is done.
bool takes_more(const Problem& problem, const Plan& rings, double rest_s, double limit_s) {
  constexpr double kRounding = 1e-6;  // more than sums of millions have
  if (problem.pipeline_stages > 1) return simulate(problem, rings).makespan_s > limit_s;
  const std::vector<double> ends = rank_ends(problem, rings);
  double done_s = rest_s;
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    if (ends[rank] > limit_s) return true;
    done_s += ends[rank] * problem.speed(static_cast<int32_t>(rank));
  }
  return done_s / total_speed(problem) * (1 - kRounding) > limit_s;
}

using Order = std::vector<SequenceId>;

// The sequences of a part of the order, best fit decreasing on one rank each.
Packed packed_decreasing(const Problem& problem, Order::const_iterator next,
                         Order::const_iterator end) {
  Packed packed(index(end - next));
  if (next == end) return packed;
  const auto tokens = [&](SequenceId id) {
    const int64_t length = problem.lengths[index(id)];
    return slice_tokens(length, 1, problem.slice_multiple);
  };
  BestFitDecreasing packing(problem.tokens_per_rank, tokens(*(end - 1)));
  for (; next != end; ++next) packed.add(packing.place(tokens(*next)));
  return packed;
}

}  // namespace

Plan naive(const Problem& problem) {
  return *naive_within(problem, longest_first(problem.lengths), kInfinity);
}

std::optional<Plan> naive_within(const Problem& problem, const std::vector<SequenceId>& order,
                                 double limit_s) {
  FewestMicroBatches ranks(problem.num_ranks);
  Plan plan;
  const bool counts = std::isfinite(limit_s) || problem.offload;
  double rest_s = counts ? total_compute_s(problem) : 0;
  const double share_s = rest_s / static_cast<double>(problem.num_ranks);
  auto next = order.begin();
  for (; next != order.end(); ++next) {
    const int64_t length = problem.lengths[index(*next)];
    const auto [degree, ratio] = memory_degree(problem, length, share_s);
    if (degree == 1 && ratio == 0) break;
    plan.add(ranks.take(degree), {*next}, ratio);
    rest_s -= compute_s(problem.cost, length);
  }
  if (std::isfinite(limit_s) && takes_more(problem, plan, rest_s, limit_s)) return std::nullopt;
  Packed packed = packed_decreasing(problem, next, order.end());
  const auto num_bins = index(packed.num_bins());
  plan.reserve(plan.rank_offsets.size() - 1 + num_bins, plan.ranks.size() + num_bins, order.size());
  for (int64_t bin = 0; bin < packed.num_bins(); ++bin) packed.open(bin, ranks.take(1), plan);
  for (; next != order.end(); ++next) packed.put(*next, plan);
  return plan;
}

}  // namespace hdp
