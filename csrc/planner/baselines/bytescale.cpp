// Algorithm 2 of the ByteScale paper without pipeline stages, as the baseline to compare with.
//
// The paper says: sort the sequences by length; cut them into buckets of about equal total FLOPs;
// then in rounds: the ranks whose time is more than delta below the greatest are the targets, they
// take micro-batches from the first bucket, the times are updated. Left open there, chosen here:
//
// - A sequence longer than the capacity is a micro-batch of its least degree by memory, which
//   offload lowers as far as memory_degree() says. The others
//   of a bucket are packed into micro-batches of at most C tokens, best fit decreasing; these come
//   after the bucket's long sequences, those of the most time first.
// - A bucket has, on average, the tokens that an eighth of the ranks hold, but 8 ranks at least, so
//   that packing has a choice. With all ranks instead of an eighth, byted loses 0.1 of its
//   efficiency at 4,096 ranks; fewer than an eighth gain nothing.
// - A rank's time is when it is free: waiting for a ring counts.
// - A round gives each target one micro-batch, the ranks with the least time first, until the
//   bucket is empty. Targets change only from round to round.
// - When no rank is more than delta behind, as at the start, all ranks are targets.
// - A sequence that needs more ranks than the round has left waits for the next round; at the start
//   of a round it also takes ranks that are no targets, those with the least time.
// - Delta is 3 % of a rank's share of the total compute: of 0 to 10 % it served github and byted
//   best, at 64 to 4,096 ranks.
// - Launch order is the order of assignment.
#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <queue>
#include <utility>

#include "planner/base/cost_model.hpp"
#include "planner/base/memory.hpp"
#include "planner/base/slices.hpp"
#include "planner/base/sorting.hpp"
#include "planner/baselines/baselines.hpp"
#include "planner/baselines/packing.hpp"
#include "planner/schedule/schedule.hpp"

namespace hdp {
namespace {

// Delta, as a part of the mean time of a rank.
constexpr double kDelta = 0.03;

// A bucket has the tokens that this part of the ranks hold, and at least so many ranks.
constexpr double kBucketPart = 1.0 / 8;
constexpr double kBucketRanks = 8;

// A micro-batch that has no ranks yet.
struct Work {
  int64_t degree = 1;
  double offload_ratio = 0;
  double compute_s = 0;
  std::vector<SequenceId> sequences;
};

using Bucket = std::vector<SequenceId>;  // sequence ids, longest first

std::vector<Bucket> buckets_of_equal_compute(const Problem& problem) {
  double tokens = 0;
  for (const int64_t length : problem.lengths) tokens += static_cast<double>(length);
  const double ranks = std::max(kBucketRanks, kBucketPart * static_cast<double>(problem.num_ranks));
  const double room = ranks * static_cast<double>(problem.tokens_per_rank);
  const double num_buckets = std::max(1.0, std::round(tokens / room));
  const double share_s = total_compute_s(problem) / num_buckets;
  std::vector<Bucket> buckets;
  double filled_s = 0;
  for (const SequenceId id : longest_first(problem.lengths)) {
    if (buckets.empty() || filled_s > share_s) {
      buckets.emplace_back();
      filled_s = 0;
    }
    buckets.back().push_back(id);
    filled_s += compute_s(problem.cost, problem.lengths[index(id)]);
  }
  return buckets;
}

// The micro-batches of a bucket, in the order in which they are assigned.
std::vector<Work> micro_batches_of(const Problem& problem, const Bucket& bucket, double share_s) {
  std::vector<Work> longs;
  std::vector<Work> packed;
  BestFit packing(problem.tokens_per_rank);
  for (const SequenceId id : bucket) {
    const int64_t length = problem.lengths[index(id)];
    const auto [degree, ratio] = memory_degree(problem, length, share_s);
    if (degree > 1 || ratio > 0) {
      longs.push_back({degree, ratio, 0, {id}});
      continue;
    }
    const std::size_t bin = index(packing.place(slice_tokens(length, 1, problem.slice_multiple)));
    if (bin == packed.size()) packed.emplace_back();
    packed[bin].sequences.push_back(id);
    packed[bin].compute_s += compute_s(problem.cost, length);
  }
  std::stable_sort(packed.begin(), packed.end(), [](const Work& left, const Work& right) {
    return left.compute_s > right.compute_s;
  });
  std::move(packed.begin(), packed.end(), std::back_inserter(longs));
  return longs;
}

// The ranks by the time at which they are free, and the plan that made it so.
class Assignment {
 public:
  explicit Assignment(const Problem& problem)
      : problem_(problem),
        delta_s_(kDelta * total_compute_s(problem) / static_cast<double>(problem.num_ranks)) {
    for (int32_t rank = 0; rank < problem.num_ranks; ++rank) ranks_.push({0, rank});
  }

  // Gives each target one micro-batch, from the one at `next` on; returns the first one left.
  std::size_t round(const std::vector<Work>& micro_batches, std::size_t next) {
    const std::vector<Entry> targets = take_targets(micro_batches[next].degree);
    auto first = targets.begin();
    for (; next < micro_batches.size(); ++next) {
      if (micro_batches[next].degree > targets.end() - first) break;
      const auto last = first + micro_batches[next].degree;
      assign(micro_batches[next], {first, last});
      first = last;
    }
    for (; first != targets.end(); ++first) ranks_.push(*first);
    return next;
  }

  Plan take_plan() { return std::move(plan_); }

 private:
  using Entry = std::pair<double, int32_t>;

  // The ranks more than delta behind, or all if there are none; at least `degree` of them.
  std::vector<Entry> take_targets(int64_t degree) {
    const double limit_s = last_s_ - delta_s_;
    const bool all = ranks_.top().first >= limit_s;
    std::vector<Entry> targets;
    while (!ranks_.empty() &&
           (all || ranks_.top().first < limit_s || static_cast<int64_t>(targets.size()) < degree)) {
      targets.push_back(ranks_.top());
      ranks_.pop();
    }
    return targets;
  }

  void assign(const Work& work, const std::vector<Entry>& entries) {
    std::vector<int32_t> ring;
    for (const Entry& entry : entries) ring.push_back(entry.second);
    std::sort(ring.begin(), ring.end());
    plan_.add(ring, work.sequences, work.offload_ratio);
    const int64_t m = plan_.num_micro_batches() - 1;
    const double end_s = entries.back().first + micro_batch_load(problem_, plan_, m).seconds;
    for (const int32_t rank : ring) ranks_.push({end_s, rank});
    last_s_ = std::max(last_s_, end_s);
  }

  const Problem& problem_;
  double delta_s_;
  double last_s_ = 0;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ranks_;
  Plan plan_;
};

}  // namespace

Plan bytescale(const Problem& problem) {
  Assignment assignment(problem);
  const double share_s = total_compute_s(problem) / static_cast<double>(problem.num_ranks);
  for (const Bucket& bucket : buckets_of_equal_compute(problem)) {
    const std::vector<Work> micro_batches = micro_batches_of(problem, bucket, share_s);
    for (std::size_t next = 0; next < micro_batches.size();) {
      next = assignment.round(micro_batches, next);
    }
  }
  return assignment.take_plan();
}

}  // namespace hdp
