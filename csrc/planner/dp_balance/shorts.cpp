#include "planner/dp_balance/shorts.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "planner/base/cost_model.hpp"
#include "planner/base/slices.hpp"
#include "planner/schedule/ways.hpp"
#include "planner/baselines/packing.hpp"
#include "planner/dp_balance/clock_heap.hpp"

namespace hdp {
namespace {

struct Short {
  SequenceId id = 0;
  double compute_s = 0;
  int64_t tokens = 0;  // padded
};

// Micro-batches of one rank: the sequences of each.
using Bins = std::vector<std::vector<SequenceId>>;

// One micro-batch in each gap, so that ranks work instead of waiting for a ring to assemble.
class GapFiller {
 public:
  GapFiller(const Problem& problem, const std::vector<Gap>& gaps)
      : gaps_(gaps),
        problem_(problem),
        bins_(gaps.size()),
        room_(gaps.size(), problem.tokens_per_rank) {
    for (std::size_t gap = 0; gap < gaps.size(); ++gap) {
      const double seconds =
          gaps[gap].seconds - fixed_s(problem.cost, 1) / problem.speed(gaps[gap].rank);
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

// The micro-batches of one rank each, and which sequences they will hold.
class RankBins {
 public:
  RankBins(std::size_t num_ranks, std::size_t num_sequences)
      : bins_(num_ranks), packed_(num_sequences) {}

  // Notes the micro-batch of the next sequence, by its number among those of the rank.
  void add(std::size_t rank, std::size_t bin) {
    if (bin == bins_[rank].size()) bins_[rank].push_back(static_cast<int32_t>(packed_.num_bins()));
    packed_.add(bins_[rank][bin]);
  }

  std::size_t size() const { return index(packed_.num_bins()); }

  // Micro-batches of a rank that has the most, and of one that has the fewest.
  std::size_t most() const { return std::max_element(bins_.begin(), bins_.end(), fewer)->size(); }
  std::size_t fewest() const { return std::min_element(bins_.begin(), bins_.end(), fewer)->size(); }

  // Adds every rank's micro-batch of that number, with room for its sequences.
  void add_round(std::size_t round, Plan& plan) {
    for (std::size_t rank = 0; rank < bins_.size(); ++rank) {
      if (round >= bins_[rank].size()) continue;
      packed_.open(bins_[rank][round], {static_cast<int32_t>(rank)}, plan);
    }
  }

  // Puts the next sequence where its micro-batch has room, in the order of add().
  void put(SequenceId id, Plan& plan) { packed_.put(id, plan); }

 private:
  using Numbers = std::vector<int32_t>;

  static bool fewer(const Numbers& left, const Numbers& right) {
    return left.size() < right.size();
  }

  std::vector<Numbers> bins_;  // of each rank, numbered over all ranks
  Packed packed_;
};

// Gives each sequence to a rank that ends early with it, a new micro-batch's fixed_s counted.
class Leveller {
 public:
  Leveller(const Problem& problem, const std::vector<double>& clocks,
           const BestFitDecreasing& packing, RankBins& bins)
      : problem_(problem),
        alike_(problem.speeds.empty()),
        fixed_s_(fixed_s(problem.cost, 1)),
        heap_(clocks),
        packings_(clocks.size(), packing),
        most_(clocks.size(), 0),
        bins_(bins) {}

  // Takes the sequence; none is longer than the one before.
  void place(const Short& item) {
    Choice best{0, end(item, 0)};
    if (!alike_) best = earliest(item, best);
    if (alike_ && fixed_s_ > 0 && !fits(item, 0)) best = earlier_with_room(item, best);
    const auto rank = index(heap_.rank(best.place));
    bins_.add(rank, index(packings_[rank].place(item.tokens)));
    if (fixed_s_ > 0) most_[rank] = packings_[rank].most();
    heap_.advance(best.place, best.end);
  }

 private:
  static constexpr std::size_t kTries = 31;  // the first five layers of the heap

  // The places below the first one in the heap, a bit each; shifted by 2 i, those below place i.
  static constexpr uint64_t kBelow = 0x6;
  static constexpr uint64_t kEnd = uint64_t{1} << 63;

  // A place of the heap and when its rank ends with the sequence.
  struct Choice {
    std::size_t place = 0;
    double end = 0;
  };

  // The best of the first places; of equals `best` or the first.
  Choice earliest(const Short& item, Choice best) const {
    const std::size_t tries = std::min(kTries, heap_.size());
    for (std::size_t i = 1; i < tries; ++i) {
      const double candidate = end(item, i);
      if (candidate < best.end) best = {i, candidate};
    }
    return best;
  }

  // The same of alike ranks, if the first one has no room: without it no other ends earlier, and
  // below one that has room or is too late none does in the heap.
  Choice earlier_with_room(const Short& item, Choice best) const {
    const std::size_t size = std::min(kTries, heap_.size());
    uint64_t left = kBelow | kEnd;  // a bit for each place to look at
    for (;;) {
      const auto i = index(__builtin_ctzll(left));
      if (i >= size) return best;
      left &= left - 1;
      const double candidate = heap_.clock(i) + item.compute_s;
      if (candidate >= best.end) continue;
      if (fits(item, i)) {
        best = {i, candidate};
      } else {
        left |= kBelow << 2 * i;
      }
    }
  }

  double end(const Short& item, std::size_t place) const {
    const double fixed = fixed_s_ == 0 || fits(item, place) ? 0 : fixed_s_;
    const double seconds = item.compute_s + fixed;
    const int32_t rank = heap_.rank(place);
    return heap_.clock(place) + (alike_ ? seconds : seconds / problem_.speed(rank));
  }

  bool fits(const Short& item, std::size_t place) const {
    return item.tokens <= most_[index(heap_.rank(place))];
  }

  const Problem& problem_;
  bool alike_;      // all ranks have speed 1
  double fixed_s_;  // of a micro-batch
  ClockHeap heap_;
  std::vector<BestFitDecreasing> packings_;  // by rank
  std::vector<int64_t> most_;                // tokens that fit, by rank, if fixed_s_ counts
  RankBins& bins_;
};

// Which short sequences fill gaps, and the micro-batches of the others.
struct Filling {
  GapFiller gaps;
  std::vector<bool> in_gap;  // by place
  RankBins bins;
};

Filling fill(const Batch& batch, const RingSchedule& schedule, const PlaceSet& shorts,
             double room) {
  const Problem& problem = batch.problem;
  const auto tokens = [&](std::size_t place) {
    return slice_tokens(batch.length(place), 1, problem.slice_multiple);
  };
  Filling filling{GapFiller(problem, schedule.gaps), std::vector<bool>(shorts.size()),
                  RankBins(schedule.clocks.size(), shorts.size())};
  const BestFitDecreasing empty(
      static_cast<int64_t>(room * static_cast<double>(problem.tokens_per_rank)),
      tokens(shorts.size() - 1));
  Leveller leveller(problem, schedule.clocks, empty, filling.bins);
  for (auto place = shorts.next(0); place < shorts.size(); place = shorts.next(place + 1)) {
    const Short item{batch.order[place], batch.compute_s(place), tokens(place)};
    filling.in_gap[place] = filling.gaps.place(item);
    if (!filling.in_gap[place]) leveller.place(item);
  }
  return filling;
}

void add_rings(const Batch& batch, const RingSchedule& schedule, const Bins& gap_bins, Plan& plan) {
  std::size_t gap = 0;
  for (std::size_t i = 0; i < schedule.places.size(); ++i) {
    for (; gap < schedule.gaps.size() && schedule.gaps[gap].ring == i; ++gap) {
      if (!gap_bins[gap].empty()) plan.add({schedule.gaps[gap].rank}, gap_bins[gap]);
    }
    const std::size_t place = schedule.places[i];
    add_sequence(batch.problem, schedule.ring(i), batch.order[place], plan);
    if (!schedule.local_ends.empty()) plan.end_locals(schedule.local_ends[i]);
  }
}

}  // namespace

Plan place_shorts(const Batch& batch, const RingSchedule& schedule, const PlaceSet& shorts,
                  const ShortsStyle& style, Locals locals) {
  Filling filling = fill(batch, schedule, shorts, style.room);
  RankBins& bins = filling.bins;
  Plan plan;
  const auto lead = index(style.lead);
  if (bins.fewest() < lead) return plan;
  const std::size_t num_single = bins.size() + schedule.gaps.size();
  plan.reserve(schedule.places.size() + num_single, schedule.ranks.size() + num_single,
               shorts.size());
  plan.locals = std::move(locals);
  for (std::size_t i = 0; i < lead; ++i) bins.add_round(i, plan);
  add_rings(batch, schedule, filling.gaps.bins(), plan);
  const std::size_t num_rounds = bins.most();
  for (std::size_t i = lead; i < num_rounds; ++i) bins.add_round(i, plan);
  for (auto place = shorts.next(0); place < shorts.size(); place = shorts.next(place + 1)) {
    if (!filling.in_gap[place]) bins.put(batch.order[place], plan);
  }
  return plan;
}

}  // namespace hdp
