#include "planner/dp_balance/shorts.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "planner/base/memory.hpp"
#include "planner/base/slices.hpp"
#include "planner/dp_balance/clock_heap.hpp"

namespace hdp {
namespace {

struct Short {
  int64_t id = 0;
  double compute_s = 0;
  int64_t tokens = 0;  // padded
};

// Micro-batches of one rank: the sequences of each.
using Bins = std::vector<std::vector<int64_t>>;

// One micro-batch in each gap, so that ranks work instead of waiting for a ring to assemble.
class GapFiller {
 public:
  GapFiller(const Problem& problem, const std::vector<Gap>& gaps)
      : gaps_(gaps),
        problem_(problem),
        bins_(gaps.size()),
        room_(gaps.size(), problem.tokens_per_rank) {
    for (std::size_t gap = 0; gap < gaps.size(); ++gap) {
      const double seconds = gaps[gap].seconds - problem.cost.g / problem.speed(gaps[gap].rank);
      if (seconds > 0) left_.emplace(seconds, gap);
    }
  }

  // Takes the sequence into the shortest gap that holds it, if one of the first few does.
  bool place(const Short& item) {
    constexpr int kTries = 8;
    auto entry = left_.lower_bound({item.compute_s, 0});
    for (int i = 0; i < kTries && entry != left_.end(); ++i, ++entry) {
      const std::size_t gap = entry->second;
      const double seconds = item.compute_s / problem_.speed(gaps_[gap].rank);
      if (room_[gap] < item.tokens || seconds > entry->first) continue;
      bins_[gap].push_back(item.id);
      room_[gap] -= item.tokens;
      auto changed = left_.extract(entry);
      changed.value().first -= seconds;
      left_.insert(std::move(changed));
      return true;
    }
    return false;
  }

  const Bins& bins() const { return bins_; }

 private:
  const std::vector<Gap>& gaps_;
  const Problem& problem_;
  Bins bins_;
  std::vector<int64_t> room_;
  std::set<std::pair<double, std::size_t>> left_;  // (seconds left, gap)
};

// The room in the micro-batches of one rank, filled best fit.
class Packing {
 public:
  explicit Packing(int64_t capacity) : capacity_(capacity) {}

  std::size_t num_bins() const { return room_.size(); }

  bool fits(int64_t tokens) const { return fullest(tokens) < room_.size(); }

  // The bin that takes an item.
  std::size_t place(int64_t tokens) {
    const std::size_t bin = fullest(tokens);
    if (bin == room_.size()) room_.push_back(std::max(capacity_, tokens));
    room_[bin] -= tokens;
    return bin;
  }

 private:
  // The bin with the least room for so many tokens; the number of bins if none has it.
  std::size_t fullest(int64_t tokens) const {
    std::size_t found = room_.size();
    for (std::size_t bin = 0; bin < room_.size(); ++bin) {
      if (room_[bin] >= tokens && (found == room_.size() || room_[bin] < room_[found])) found = bin;
    }
    return found;
  }

  int64_t capacity_;
  std::vector<int64_t> room_;
};

// Gives each sequence to a rank that ends early with it, a new micro-batch's g counted.
class Leveller {
 public:
  Leveller(const Problem& problem, const std::vector<double>& clocks, int64_t capacity)
      : problem_(problem), heap_(clocks), packings_(clocks.size(), Packing(capacity)) {}

  void place(const Short& item) {
    const bool first_is_best = problem_.cost.g == 0 && problem_.speeds.empty();
    std::size_t best = 0;
    double best_end = end(item, 0);
    const std::size_t tries = first_is_best ? 1 : std::min(kTries, heap_.size());
    for (std::size_t i = 1; i < tries; ++i) {
      const double candidate = end(item, i);
      if (candidate < best_end) {
        best = i;
        best_end = candidate;
      }
    }
    const auto rank = static_cast<std::size_t>(heap_.rank(best));
    placed_.push_back({item.id, rank, packings_[rank].place(item.tokens)});
    heap_.advance(best, best_end);
  }

  // Every rank's first micro-batch, then every rank's second, and so on.
  std::vector<Bins> rounds() const {
    std::size_t most = 0;
    for (const Packing& packing : packings_) most = std::max(most, packing.num_bins());
    std::vector<Bins> rounds(most);
    for (std::size_t i = 0; i < most; ++i) rounds[i].resize(packings_.size());
    for (const Placed& placed : placed_) rounds[placed.bin][placed.rank].push_back(placed.id);
    return rounds;
  }

  std::size_t fewest_bins() const {
    std::size_t fewest = packings_.front().num_bins();
    for (const Packing& packing : packings_) fewest = std::min(fewest, packing.num_bins());
    return fewest;
  }

 private:
  static constexpr std::size_t kTries = 31;  // the first five layers of the heap

  struct Placed {
    int64_t id = 0;
    std::size_t rank = 0;
    std::size_t bin = 0;
  };

  double end(const Short& item, std::size_t place) const {
    const int32_t rank = heap_.rank(place);
    const Packing& packing = packings_[static_cast<std::size_t>(rank)];
    const double g = problem_.cost.g == 0 || packing.fits(item.tokens) ? 0 : problem_.cost.g;
    return heap_.clock(place) + (item.compute_s + g) / problem_.speed(rank);
  }

  const Problem& problem_;
  ClockHeap heap_;
  std::vector<Packing> packings_;
  std::vector<Placed> placed_;
};

void add_rings(const Batch& batch, const RingSchedule& schedule, const Bins& gap_bins, Plan& plan) {
  std::size_t gap = 0;
  for (std::size_t i = 0; i < schedule.places.size(); ++i) {
    for (; gap < schedule.gaps.size() && schedule.gaps[gap].ring == i; ++gap) {
      if (!gap_bins[gap].empty()) plan.add({schedule.gaps[gap].rank}, gap_bins[gap]);
    }
    const std::size_t place = schedule.places[i];
    const std::vector<int32_t> ring = schedule.ring(i);
    const auto degree = static_cast<int64_t>(ring.size());
    plan.add(ring, {batch.order[place]},
             schedule.locals.empty() ? std::vector<Local>{} : schedule.locals[i],
             *offload_ratio(batch.problem, batch.length(place), degree));
  }
}

void add_round(const Bins& round, Plan& plan) {
  for (std::size_t rank = 0; rank < round.size(); ++rank) {
    if (!round[rank].empty()) plan.add({static_cast<int32_t>(rank)}, round[rank]);
  }
}

}  // namespace

Plan place_shorts(const Batch& batch, const RingSchedule& schedule,
                  const std::vector<std::size_t>& shorts, const ShortsStyle& style) {
  const Problem& problem = batch.problem;
  GapFiller gaps(problem, schedule.gaps);
  const double room = style.room * static_cast<double>(problem.tokens_per_rank);
  Leveller leveller(problem, schedule.clocks, static_cast<int64_t>(room));
  for (const std::size_t place : shorts) {
    const Short item{batch.order[place], batch.compute_s[place],
                     slice_tokens(batch.length(place), 1, problem.slice_multiple)};
    if (!gaps.place(item)) leveller.place(item);
  }
  Plan plan;
  const auto lead = static_cast<std::size_t>(style.lead);
  if (leveller.fewest_bins() < lead) return plan;
  const std::vector<Bins> rounds = leveller.rounds();
  for (std::size_t i = 0; i < lead; ++i) add_round(rounds[i], plan);
  add_rings(batch, schedule, gaps.bins(), plan);
  for (std::size_t i = lead; i < rounds.size(); ++i) add_round(rounds[i], plan);
  return plan;
}

}  // namespace hdp
