#include "planner/pp_balance/fill.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>
#include <utility>

#include "planner/base/cost_model.hpp"
#include "planner/base/slices.hpp"

namespace hdp {
namespace {

// One rank's micro-batches while they are filled.
struct Open {
  std::vector<double> seconds;
  std::vector<int64_t> room;
};

// The bin with the least time of those that have room; a new one if none has.
std::size_t least_filled(Open& open, int64_t tokens, int64_t capacity) {
  std::size_t best = open.room.size();
  for (std::size_t bin = 0; bin < open.room.size(); ++bin) {
    if (open.room[bin] < tokens) continue;
    if (best == open.room.size() || open.seconds[bin] < open.seconds[best]) best = bin;
  }
  if (best == open.room.size()) {
    open.room.push_back(capacity);
    open.seconds.push_back(0);
  }
  return best;
}

// Puts the light micro-batches at both ends of a rank's list: those needed rise, the others fall.
void order_bins(int64_t needed, const std::vector<double>& seconds, std::vector<Bin>& bins) {
  std::vector<std::size_t> order(bins.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto middle = order.begin() + needed;
  std::stable_sort(order.begin(), middle, [&](std::size_t left, std::size_t right) {
    return seconds[left] < seconds[right];
  });
  std::stable_sort(middle, order.end(), [&](std::size_t left, std::size_t right) {
    return seconds[left] > seconds[right];
  });
  std::vector<Bin> ordered;
  for (const std::size_t bin : order) {
    if (!bins[bin].empty()) ordered.push_back(std::move(bins[bin]));
  }
  bins = std::move(ordered);
}

}  // namespace

Shorts::Shorts(const Problem& problem, const std::vector<SequenceId>& order) : problem_(problem) {
  int64_t tokens = 0;
  for (const SequenceId id : order) {
    const int64_t length = problem.lengths[static_cast<std::size_t>(id)];
    const int64_t padded = slice_tokens(length, 1, problem.slice_multiple);
    if (padded > problem.tokens_per_rank) continue;
    shorts_.push_back({id, padded, compute_s(problem.cost, length)});
    total_s_ += shorts_.back().seconds;
    tokens += padded;
  }
  constexpr double kNearlyFull = 0.97;
  if (tokens > 0) {
    full_bin_s_ = kNearlyFull * total_s_ * static_cast<double>(problem.tokens_per_rank) /
                  static_cast<double>(tokens);
  }
}

int64_t Shorts::num_bins(double seconds, double bin_s) const {
  constexpr double kRounding = 1e-9;
  if (shorts_.empty() || seconds <= 0) return 0;
  // smaller micro-batches than the longest sequence would not be alike
  const double longest_s = std::max(shorts_[0].seconds, std::min(bin_s, full_bin_s_));
  if (longest_s <= 0) return 0;
  const double most = static_cast<double>(shorts_.size());
  return static_cast<int64_t>(std::min(most, std::ceil(seconds / longest_s - kRounding)));
}

bool Shorts::fill(const std::vector<int64_t>& needed, const std::vector<double>& wanted_s,
                  double bin_s, Filling& filling) const {
  std::vector<Open> open(needed.size());
  std::priority_queue<std::pair<double, std::size_t>> lacking;  // (seconds, ranks from the end)
  std::size_t num_empty = 0;
  filling.bins.assign(needed.size(), {});
  filling.seconds.assign(needed.size(), 0.0);
  for (std::size_t rank = 0; rank < needed.size(); ++rank) {
    const double speed = problem_.speed(static_cast<int32_t>(rank));
    const auto num =
        static_cast<std::size_t>(std::max(needed[rank], num_bins(wanted_s[rank], bin_s * speed)));
    open[rank].seconds.assign(num, 0.0);
    open[rank].room.assign(num, problem_.tokens_per_rank);
    filling.bins[rank].resize(num);
    num_empty += static_cast<std::size_t>(needed[rank]);
    lacking.emplace(wanted_s[rank], needed.size() - rank);
  }
  if (num_empty > shorts_.size()) return false;

  const auto put = [&](const Short& item, std::size_t rank, std::size_t bin) {
    if (bin == filling.bins[rank].size()) filling.bins[rank].emplace_back();
    if (filling.bins[rank][bin].empty() && bin < static_cast<std::size_t>(needed[rank])) {
      --num_empty;
    }
    filling.bins[rank][bin].push_back(item.id);
    open[rank].seconds[bin] += item.seconds;
    open[rank].room[bin] -= item.tokens;
    filling.seconds[rank] += item.seconds;
  };
  std::size_t i = 0;
  for (; i < shorts_.size() && num_empty < shorts_.size() - i; ++i) {
    const std::size_t rank = needed.size() - lacking.top().second;
    lacking.pop();
    put(shorts_[i], rank, least_filled(open[rank], shorts_[i].tokens, problem_.tokens_per_rank));
    lacking.emplace(wanted_s[rank] - filling.seconds[rank], needed.size() - rank);
  }
  for (std::size_t rank = 0; num_empty > 0; ++rank) {  // one for each that is needed and empty
    for (std::size_t bin = 0; bin < static_cast<std::size_t>(needed[rank]); ++bin) {
      if (filling.bins[rank][bin].empty()) put(shorts_[i++], rank, bin);
    }
  }
  for (std::size_t rank = 0; rank < needed.size(); ++rank) {
    order_bins(needed[rank], open[rank].seconds, filling.bins[rank]);
  }
  return true;
}

}  // namespace hdp
