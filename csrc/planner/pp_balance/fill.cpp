#include "planner/pp_balance/fill.hpp"

#include <algorithm>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>

#include "planner/base/cost_model.hpp"
#include "planner/base/slices.hpp"

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
        bins_(slots.size()) {
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
    std::vector<std::size_t> items;

    double lacks_s() const { return wanted_s - seconds; }
  };

  void put(std::size_t i, std::size_t bin) {
    open_[bin].items.push_back(i);
    open_[bin].seconds += shorts_[i].seconds;
    open_[bin].room -= shorts_[i].tokens;
    lacks_s_[open_[bin].rank] -= shorts_[i].seconds;
  }

  std::size_t new_bin(std::size_t rank) {
    open_.push_back({0, 0, capacity_, rank, {}});
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
  // has room, the first of these gets another.
  void place(std::size_t first, std::size_t last) {
    constexpr int kTries = 8;
    std::priority_queue<std::pair<double, std::size_t>> lacking;  // (seconds, ranks from the end)
    for (std::size_t rank = 0; rank < bins_.size(); ++rank) {
      lacking.emplace(lacks_s_[rank], bins_.size() - rank);
    }
    std::vector<std::size_t> tried;
    for (std::size_t i = first; i < last; ++i) {
      tried.clear();
      std::size_t bin = kNone;
      while (bin == kNone && !lacking.empty() && tried.size() < kTries) {
        tried.push_back(bins_.size() - lacking.top().second);
        lacking.pop();
        bin = bin_of(tried.back(), shorts_[i].tokens);
      }
      put(i, bin == kNone ? new_bin(tried.front()) : bin);
      for (const std::size_t rank : tried) lacking.emplace(lacks_s_[rank], bins_.size() - rank);
    }
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
    const auto is_filled = [&](std::size_t bin) { return !open_[bin].items.empty(); };
    const auto needed = std::count_if(slots_[rank].begin(), slots_[rank].end(),
                                      [](const Slot& slot) { return slot.is_needed; });
    auto filled = std::count_if(bins_[rank].begin(), bins_[rank].end(), is_filled);
    for (std::size_t k = 0; filled < needed; ++k) {
      const std::size_t bin = bins_[rank][k];
      if (is_filled(bin)) continue;
      while (giver_ < open_.size() && !can_give(giver_)) ++giver_;
      if (giver_ == open_.size()) return false;
      const std::size_t i = open_[giver_].items.back();
      open_[giver_].items.pop_back();
      open_[giver_].seconds -= shorts_[i].seconds;
      put(i, bin);
      ++filled;
    }
    return true;
  }

  bool can_give(std::size_t bin) const {
    const bool is_spare = slots_[open_[bin].rank].empty();
    return open_[bin].items.size() > (is_spare ? 0U : 1U);
  }

  void collect(Filling& filling) {
    filling.bins.assign(slots_.size(), {});
    filling.seconds.assign(slots_.size(), 0.0);
    for (std::size_t rank = 0; rank < slots_.size(); ++rank) {
      std::vector<std::size_t>& bins = bins_[rank];
      bins.erase(std::remove_if(bins.begin(), bins.end(),
                                [&](std::size_t bin) { return open_[bin].items.empty(); }),
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
        filling.bins[rank].emplace_back();
        for (const std::size_t i : open_[bin].items) {
          filling.bins[rank].back().push_back(shorts_[i].id);
        }
      }
    }
  }

  const std::vector<Whole>& shorts_;  // behind the first num_long_
  std::size_t num_long_;
  int64_t capacity_;
  const std::vector<std::vector<Slot>>& slots_;
  std::vector<double> lacks_s_;                 // by rank
  std::vector<std::vector<std::size_t>> bins_;  // by rank: index into the open ones
  std::vector<Open> open_;
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
    full_bin_s_ = kNearlyFull * total_s_ * static_cast<double>(problem.tokens_per_rank) /
                  static_cast<double>(tokens);
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
