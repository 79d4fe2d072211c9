#include "planner/shorts.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "planner/cost_model.hpp"
#include "planner/packing.hpp"
#include "planner/slices.hpp"

namespace hdp {
namespace {

using Bins = std::vector<std::vector<int64_t>>;

// One micro-batch in each gap, so that ranks work instead of waiting for a ring to assemble.
class GapFiller {
 public:
  GapFiller(const Problem& problem, const std::vector<Gap>& gaps)
      : problem_(problem), bins_(gaps.size()), room_(gaps.size(), problem.tokens_per_rank) {
    for (std::size_t gap = 0; gap < gaps.size(); ++gap) {
      if (gaps[gap].seconds > problem.cost.g) {
        left_.emplace(gaps[gap].seconds - problem.cost.g, gap);
      }
    }
  }

  // Takes the sequence into the shortest gap that holds it, if one of the first few does.
  bool place(int64_t id, double seconds, int64_t tokens) {
    constexpr int kTries = 8;
    auto entry = left_.lower_bound({seconds, 0});
    for (int i = 0; i < kTries && entry != left_.end(); ++i, ++entry) {
      const std::size_t gap = entry->second;
      if (room_[gap] < tokens) continue;
      bins_[gap].push_back(id);
      room_[gap] -= tokens;
      auto changed = left_.extract(entry);
      changed.value().first -= seconds;
      left_.insert(std::move(changed));
      return true;
    }
    return false;
  }

  const Bins& bins() const { return bins_; }

 private:
  const Problem& problem_;
  Bins bins_;
  std::vector<int64_t> room_;
  std::set<std::pair<double, std::size_t>> left_;  // (seconds left, gap)
};

// Gives each sequence to a rank that ends early with it, a new micro-batch's g counted.
class Leveller {
 public:
  Leveller(const Problem& problem, const std::vector<double>& clocks)
      : g_(problem.cost.g),
        packings_(clocks.size(), BestFit(problem.tokens_per_rank)),
        bins_(clocks.size()) {
    for (std::size_t rank = 0; rank < clocks.size(); ++rank) clocks_.emplace(clocks[rank], rank);
  }

  void place(int64_t id, double seconds, int64_t tokens) {
    auto entry = clocks_.extract(earliest_end(tokens));
    const std::size_t rank = entry.value().second;
    const double g = packings_[rank].fits(tokens) ? 0 : g_;
    const auto bin = static_cast<std::size_t>(packings_[rank].place(tokens));
    if (bin == bins_[rank].size()) bins_[rank].emplace_back();
    bins_[rank][bin].push_back(id);
    entry.value().first += g + seconds;
    clocks_.insert(std::move(entry));
  }

  const std::vector<Bins>& bins() const { return bins_; }

 private:
  using Clocks = std::set<std::pair<double, std::size_t>>;

  Clocks::iterator earliest_end(int64_t tokens) {
    constexpr int kTries = 32;
    const auto first = clocks_.begin();
    auto entry = first;
    for (int i = 0; i < kTries && entry != clocks_.end(); ++i, ++entry) {
      if (entry->first >= first->first + g_ && i > 0) break;
      if (packings_[entry->second].fits(tokens)) return entry;
    }
    return first;
  }

  double g_;
  std::vector<BestFit> packings_;
  std::vector<Bins> bins_;
  Clocks clocks_;
};

void add_rings(const RingSchedule& schedule, const Bins& gap_bins, Plan& plan) {
  std::size_t gap = 0;
  for (std::size_t i = 0; i < schedule.rings.size(); ++i) {
    for (; gap < schedule.gaps.size() && schedule.gaps[gap].ring == i; ++gap) {
      if (!gap_bins[gap].empty()) plan.add({schedule.gaps[gap].rank}, gap_bins[gap]);
    }
    const Ring& ring = schedule.rings[i];
    plan.add(ring.ranks, {ring.sequence}, ring.locals);
  }
}

// Every rank's first micro-batch, then every rank's second, and so on.
void add_levelled(const std::vector<Bins>& bins, Plan& plan) {
  std::size_t most = 0;
  for (const Bins& of_rank : bins) most = std::max(most, of_rank.size());
  for (std::size_t i = 0; i < most; ++i) {
    for (std::size_t rank = 0; rank < bins.size(); ++rank) {
      if (i < bins[rank].size()) plan.add({static_cast<int32_t>(rank)}, bins[rank][i]);
    }
  }
}

}  // namespace

Plan place_shorts(const Problem& problem, RingSchedule schedule) {
  GapFiller gaps(problem, schedule.gaps);
  Leveller leveller(problem, schedule.clocks);
  for (const int64_t id : schedule.shorts) {
    const int64_t length = problem.lengths[static_cast<std::size_t>(id)];
    const double seconds = compute_s(problem.cost, length);
    const int64_t tokens = slice_tokens(length, 1, problem.slice_multiple);
    if (!gaps.place(id, seconds, tokens)) leveller.place(id, seconds, tokens);
  }
  Plan plan;
  add_rings(schedule, gaps.bins(), plan);
  add_levelled(leveller.bins(), plan);
  return plan;
}

}  // namespace hdp
