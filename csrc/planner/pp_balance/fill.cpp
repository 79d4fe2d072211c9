#include "planner/pp_balance/fill.hpp"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "planner/base/cost_model.hpp"
#include "planner/base/slices.hpp"
#include "planner/dp_balance/clock_heap.hpp"

namespace hdp {
namespace {

constexpr std::size_t kNone = index(-1);

// So many slots of a rank, all that are needed among them, those that want most first.
std::vector<std::size_t> used_slots(const std::vector<Slot>& slots, std::size_t num) {
  std::vector<std::size_t> order(slots.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto by = [&](const auto& key) {
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t left, std::size_t right) { return key(left) < key(right); });
  };
  by([&](std::size_t i) {
    return std::make_tuple(!slots[i].is_needed, -slots[i].wanted_s, slots[i].distance);
  });
  order.resize(std::min(num, order.size()));
  by([&](std::size_t i) { return std::make_tuple(-slots[i].wanted_s, slots[i].distance); });
  return order;
}

}  // namespace

// Fills the bins of all ranks, one a slot, each with about what its slot wants.
class Shorts::Filler {
 public:
  Filler(const Shorts& shorts, const std::vector<std::vector<Slot>>& slots)
      : shorts_(shorts.all_),
        num_long_(shorts.num_long_),
        capacity_(shorts.problem_.tokens_per_rank),
        slots_(slots),
        lacks_s_(slots.size(), 0.0),
        bins_(slots.size()),
        before_(shorts.all_.size(), kNone) {
    for (std::size_t rank = 0; rank < slots.size(); ++rank) {
      for (const Slot& slot : slots[rank]) {
        const std::size_t bin = new_bin(rank);
        open_[bin].wanted_s = slot.wanted_s;
        lacks_s_[rank] += slot.wanted_s;
        if (slot.base != kNoPlace) put(slot.base, bin);
      }
    }
  }

  bool run(Filling& filling) {
    if (open_.empty()) new_bin(0);
    place(fine(coarse()), shorts_.size());
    for (std::size_t rank = 0; rank < slots_.size(); ++rank) {
      if (!fill_needed(rank)) return false;
    }
    collect(filling);
    return true;
  }

 private:
  struct Open {
    double wanted_s = 0;
    double seconds = 0;
    int64_t room = 0;
    std::size_t rank = 0;
    std::size_t last = kNone;  // of its sequences; `before_` has the others
    std::size_t size = 0;      // so many sequences

    double lacks_s() const { return wanted_s - seconds; }
  };

  void put(std::size_t i, std::size_t bin) {
    Open& open = open_[bin];
    before_[i] = open.last;
    open.last = i;
    ++open.size;
    open.seconds += shorts_[i].seconds;
    open.room -= shorts_[i].tokens;
    lacks_s_[open.rank] -= shorts_[i].seconds;
  }

  std::size_t new_bin(std::size_t rank) {
    open_.push_back({0, 0, capacity_, rank});
    bins_[rank].push_back(open_.size() - 1);
    return open_.size() - 1;
  }

  // The bin of a rank that lacks most of those that have room; kNone if none has.
  std::size_t bin_of(std::size_t rank, int64_t tokens) const {
    std::size_t best = kNone;
    for (const std::size_t bin : bins_[rank]) {
      if (open_[bin].room < tokens) continue;
      if (best == kNone || open_[bin].lacks_s() > open_[best].lacks_s()) best = bin;
    }
    return best;
  }

  // The first sequences, each of which matters; returns the end of them.
  std::size_t coarse() {
    constexpr double kFine = 0.04;  // of a mean bin
    double mean_s = 0;
    for (const Open& one : open_) mean_s += one.wanted_s;
    mean_s /= static_cast<double>(open_.size());
    std::size_t end = num_long_;
    while (end < shorts_.size() && shorts_[end].seconds > kFine * mean_s) ++end;
    place(num_long_, end);
    return end;
  }

  // Each where most is lacking: the rank first, then its bin. Where no bin of the first few ranks
  // has room, the first of these gets another. Sequences come longest first: ranks that had no room
  // wait beside the others.
  void place(std::size_t first, std::size_t last) {
    constexpr std::size_t kTries = 8;
    std::vector<double> excess_s;  // the less, the more a rank lacks
    std::vector<int64_t> room;     // of a rank's bin with most
    for (std::size_t rank = 0; rank < bins_.size(); ++rank) {
      excess_s.push_back(-lacks_s_[rank]);
      room.push_back(most_room(rank));
    }
    ClockHeap others(excess_s);
    std::vector<std::pair<double, int32_t>> full;  // in the same order
    for (std::size_t i = first; i < last; ++i) {
      const auto has_room = [&](int32_t rank) { return room[index(rank)] >= shorts_[i].tokens; };
      const auto is_next = [&](std::size_t k) {
        return k < full.size() && (others.size() == 0 || full[k] < others.earliest());
      };
      std::size_t tried = 0;
      while (tried < kTries) {
        if (is_next(tried)) {
          if (has_room(full[tried].second)) break;
        } else {
          if (others.size() == 0 || has_room(others.rank(0))) break;
          full.insert(at(full, tried), others.pop());
        }
        ++tried;
      }
      const bool none = tried == kTries || (tried == full.size() && others.size() == 0);
      if (none) tried = 0;
      const bool from_full = none || is_next(tried);
      const std::size_t rank = index(from_full ? full[tried].second : others.rank(0));
      put(i, none ? new_bin(rank) : bin_of(rank, shorts_[i].tokens));
      room[rank] = most_room(rank);
      if (from_full) {
        full.erase(at(full, tried));
        others.push({-lacks_s_[rank], static_cast<int32_t>(rank)});
      } else {
        others.advance(0, -lacks_s_[rank]);
      }
    }
  }

  int64_t most_room(std::size_t rank) const {
    int64_t most = 0;
    for (const std::size_t bin : bins_[rank]) most = std::max(most, open_[bin].room);
    return most;
  }

  // The others, bin after bin, as much as it lacks; returns the first that found no room.
  std::size_t fine(std::size_t i) {
    double ahead_s = 0;  // what the bins so far have above what they lacked
    for (std::size_t bin = 0; bin < open_.size() && i < shorts_.size(); ++bin) {
      const double lacked_s = std::min(open_[bin].lacks_s(), lacks_s_[open_[bin].rank]);
      if (lacked_s <= 0) continue;
      double given_s = 0;
      while (i < shorts_.size() && open_[bin].room >= shorts_[i].tokens &&
             ahead_s + given_s + shorts_[i].seconds / 2 < lacked_s) {
        given_s += shorts_[i].seconds;
        put(i++, bin);
      }
      const double item_s = i > num_long_ ? shorts_[i - 1].seconds : 0;
      ahead_s = std::max(-item_s, ahead_s + given_s - lacked_s);
    }
    return i;
  }

  // Sees to it that a rank has as many micro-batches as it needs: takes sequences out of bins with
  // several, of its own or of others.
  bool fill_needed(std::size_t rank) {
    const auto is_filled = [&](std::size_t bin) { return open_[bin].size > 0; };
    const auto needed = std::count_if(slots_[rank].begin(), slots_[rank].end(),
                                      [](const Slot& slot) { return slot.is_needed; });
    auto filled = std::count_if(bins_[rank].begin(), bins_[rank].end(), is_filled);
    for (std::size_t k = 0; filled < needed; ++k) {
      const std::size_t bin = bins_[rank][k];
      if (is_filled(bin)) continue;
      while (giver_ < open_.size() && !can_give(giver_)) ++giver_;
      if (giver_ == open_.size()) return false;
      Open& giver = open_[giver_];
      const std::size_t i = giver.last;
      giver.last = before_[i];
      --giver.size;
      giver.seconds -= shorts_[i].seconds;
      put(i, bin);
      ++filled;
    }
    return true;
  }

  bool can_give(std::size_t bin) const {
    const bool is_spare = slots_[open_[bin].rank].empty();
    return open_[bin].size > (is_spare ? 0U : 1U);
  }

  void collect(Filling& filling) {
    filling.bins.assign(slots_.size(), {});
    filling.seconds.assign(slots_.size(), 0.0);
    for (std::size_t rank = 0; rank < slots_.size(); ++rank) {
      std::vector<std::size_t>& bins = bins_[rank];
      bins.erase(std::remove_if(bins.begin(), bins.end(),
                                [&](std::size_t bin) { return open_[bin].size == 0; }),
                 bins.end());
      std::stable_sort(bins.begin(), bins.end(), [&](std::size_t left, std::size_t right) {
        return open_[left].seconds > open_[right].seconds;
      });
      const std::vector<std::size_t> used = used_slots(slots_[rank], bins.size());
      std::vector<std::size_t> in_slot(slots_[rank].size(), kNone);
      for (std::size_t i = 0; i < used.size(); ++i) in_slot[used[i]] = bins[i];
      in_slot.insert(in_slot.end(), at(bins, used.size()), bins.end());
      for (const std::size_t bin : in_slot) {
        if (bin == kNone) continue;
        filling.seconds[rank] += open_[bin].seconds;
        filling.bins[rank].push_back(ids_of(open_[bin]));
      }
    }
  }

  Bin ids_of(const Open& open) const {
    Bin ids(open.size);
    std::size_t i = open.last;
    for (auto id = ids.rbegin(); id != ids.rend(); ++id, i = before_[i]) *id = shorts_[i].id;
    return ids;
  }

  const std::vector<Whole>& shorts_;  // behind the first num_long_
  std::size_t num_long_;
  int64_t capacity_;
  const std::vector<std::vector<Slot>>& slots_;
  std::vector<double> lacks_s_;                 // by rank
  std::vector<std::vector<std::size_t>> bins_;  // by rank: index into the open ones
  std::vector<Open> open_;
  std::vector<std::size_t> before_;  // of each sequence the one that its bin got before it
  std::size_t giver_ = 0;
};

std::vector<Whole> whole_sequences(const Problem& problem, const std::vector<SequenceId>& order) {
  std::vector<Whole> all;
  all.reserve(order.size());
  for (const SequenceId id : order) {
    const int64_t length = problem.lengths[index(id)];
    all.push_back(
        {id, slice_tokens(length, 1, problem.slice_multiple), compute_s(problem.cost, length)});
  }
  return all;
}

Shorts::Shorts(const Problem& problem, const std::vector<Whole>& all, std::size_t num_long)
    : problem_(problem), all_(all), num_long_(num_long) {
  int64_t tokens = 0;
  for (std::size_t i = num_long; i < all.size(); ++i) {
    total_s_ += all[i].seconds;
    tokens += all[i].tokens;
  }
  constexpr double kNearlyFull = 0.97;
  if (tokens > 0) {
    tokens_ = static_cast<double>(tokens);
    full_bin_s_ = kNearlyFull * total_s_ * static_cast<double>(problem.tokens_per_rank) / tokens_;
  }
}

double Shorts::bin_s(double unit_s) const {
  if (size() == 0) return 0;
  // smaller micro-batches than the longest sequence would not be alike
  return std::max(all_[num_long_].seconds, std::min(unit_s, full_bin_s_));
}

bool Shorts::fill(const std::vector<std::vector<Slot>>& slots, Filling& filling) const {
  return Filler(*this, slots).run(filling);
}

}  // namespace hdp
