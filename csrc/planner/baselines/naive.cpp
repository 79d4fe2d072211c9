#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <queue>

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

}  // namespace

Plan naive(const Problem& problem) {
  return *naive_within(problem, longest_first(problem.lengths),
                       std::numeric_limits<double>::infinity());
}

std::optional<Plan> naive_within(const Problem& problem, const std::vector<int64_t>& order,
                                 double limit_s) {
  FewestMicroBatches ranks(problem.num_ranks);
  Plan plan;
  auto next = order.begin();
  for (; next != order.end(); ++next) {
    const int64_t length = problem.lengths[static_cast<std::size_t>(*next)];
    const int64_t degree = least_degree(problem, length);
    const double ratio = *offload_ratio(problem, length, degree);
    if (degree == 1 && ratio == 0) break;
    plan.add(ranks.take(degree), {*next}, {}, ratio);
  }
  if (std::isfinite(limit_s) && simulate(problem, plan).makespan_s > limit_s) return std::nullopt;

  BestFitDecreasing packing(problem.tokens_per_rank);
  Packed packed;
  for (auto id = next; id != order.end(); ++id) {
    const int64_t length = problem.lengths[static_cast<std::size_t>(*id)];
    packed.add(packing.place(slice_tokens(length, 1, problem.slice_multiple)));
  }
  plan.sequences.reserve(order.size());
  for (int64_t bin = 0; bin < packed.num_bins(); ++bin) packed.open(bin, ranks.take(1), plan);
  for (; next != order.end(); ++next) packed.put(*next, plan);
  return plan;
}

}  // namespace hdp
