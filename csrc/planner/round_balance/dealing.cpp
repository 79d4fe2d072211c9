#include "planner/round_balance/dealing.hpp"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

#include "planner/base/cost_model.hpp"
#include "planner/baselines/baselines.hpp"

namespace hdp {
namespace {

// Of a rank's mean time: how late a sequence may end on the least degree.
constexpr double kLevels[] = {1.0, 1.01, 1.03, 1.06, 1.1, 1.2, 1.4, 2.0, 4.0};

// Sequences that take less of a rank's mean time stay whole.
constexpr double kSmall = 1.0 / 16;

class Dealer {
 public:
  Dealer(const Problem& problem, const std::vector<SequenceId>& order, double mean_s)
      : problem_(problem), order_(order), blocks_(problem.num_ranks) {
    sequences_.resize(2 * blocks_.num_leaves());
    const auto small = std::partition_point(order.begin(), order.end(), [&](SequenceId id) {
      return room_for(problem, length(id), 1) > problem.tokens_per_rank ||
             compute_s(problem.cost, length(id)) > kSmall * mean_s;
    });
    num_long_ = index(small - order.begin());
  }

  void deal_long(double level_s) {
    for (std::size_t i = 0; i < num_long_; ++i) deal(order_[i], level_s);
  }

  // When the last rank ends if the others were a fluid.
  double fluid_end_s() const {
    double ends = 0;
    for (int64_t rank = 0; rank < problem_.num_ranks; ++rank) {
      ends += blocks_.end_s(blocks_.leaf(rank));
    }
    for (std::size_t i = num_long_; i < order_.size(); ++i) {
      ends += compute_s(problem_.cost, length(order_[i]));
    }
    return std::max(end_s(), ends / static_cast<double>(problem_.num_ranks));
  }

  void deal_short() {
    using Entry = std::pair<double, int64_t>;  // (end, rank), the earliest first
    std::vector<Entry> ends;
    for (int64_t rank = 0; rank < problem_.num_ranks; ++rank) {
      ends.emplace_back(blocks_.end_s(blocks_.leaf(rank)), rank);
    }
    const std::vector<Entry> before = ends;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue({}, std::move(ends));
    for (std::size_t i = num_long_; i < order_.size(); ++i) {
      auto [end, rank] = queue.top();
      queue.pop();
      sequences_[blocks_.leaf(rank)].push_back(order_[i]);
      queue.emplace(end + compute_s(problem_.cost, length(order_[i])), rank);
    }
    for (; !queue.empty(); queue.pop()) {
      const auto [end, rank] = queue.top();
      const double more = end - before[index(rank)].first;
      if (more > 0) blocks_.add(blocks_.leaf(rank), more);
    }
  }

  double end_s() const {
    double end = 0;
    for (int64_t rank = 0; rank < problem_.num_ranks; ++rank) {
      end = std::max(end, blocks_.end_s(blocks_.leaf(rank)));
    }
    return end;
  }

  Dealing take() {
    const double end = end_s();
    return {std::move(blocks_), std::move(sequences_), end};
  }

 private:
  int64_t length(SequenceId id) const { return problem_.lengths[index(id)]; }

  void deal(SequenceId id, double level_s) {
    std::size_t chosen = 0;
    double chosen_s = 0;
    double least_end = kInfinity;
    for (int64_t degree = 1; degree <= problem_.num_ranks; degree *= 2) {
      if (room_for(problem_, length(id), degree) > problem_.tokens_per_rank) continue;
      const std::size_t block = blocks_.earliest(degree);
      const int64_t first = blocks_.first_rank(block);
      const Links links = links_of_block(problem_.cost, first, degree);
      const double seconds = ring_s(problem_.cost, length(id), degree, links);
      const double end = blocks_.end_s(block) + seconds;
      if (end < least_end) {
        chosen = block;
        chosen_s = seconds;
        least_end = end;
      }
      if (end <= level_s) break;
    }
    blocks_.add(chosen, chosen_s);
    sequences_[chosen].push_back(id);
  }

  const Problem& problem_;
  const std::vector<SequenceId>& order_;
  std::size_t num_long_ = 0;
  Blocks blocks_;
  std::vector<std::vector<SequenceId>> sequences_;
};

}  // namespace

Dealing dealt(const Problem& problem, const std::vector<SequenceId>& order) {
  const double mean_s = total_compute_s(problem) / static_cast<double>(problem.num_ranks);
  double best_end = kInfinity;
  double best_level = 0;
  for (const double level : kLevels) {
    Dealer dealer(problem, order, mean_s);
    dealer.deal_long(level * mean_s);
    const double end = dealer.fluid_end_s();
    if (end < best_end) {
      best_end = end;
      best_level = level;
    }
  }
  Dealer dealer(problem, order, mean_s);
  dealer.deal_long(best_level * mean_s);
  dealer.deal_short();
  return dealer.take();
}

}  // namespace hdp
