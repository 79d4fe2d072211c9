// pp-balance: the rounds in an order, and what each lane runs besides its rings: so many seconds,
// slot by slot.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "planner/base/types.hpp"
#include "planner/pp_balance/fill.hpp"
#include "planner/pp_balance/seats.hpp"

namespace hdp {

// Row after row: the round that stands there, or kNoRound where every lane runs a micro-batch of
// its own. A row is a position: a lane with a ring in it needs a micro-batch in each row before.
using Rows = std::vector<int64_t>;

constexpr int64_t kNoRound = -1;

// Calls on_ring(ring) once for each ring of several ranks and on_own(lane, i) for the i-th of
// num_own[lane] micro-batches of a lane's own, position after position.
template <typename OnRing, typename OnOwn>
void in_launch_order(const Seating& seating, const Rows& rows, const std::vector<int64_t>& num_own,
                     const OnRing& on_ring, const OnOwn& on_own) {
  const std::size_t num_lanes = seating.ring_s.size();
  const int64_t most = *std::max_element(num_own.begin(), num_own.end());
  std::vector<int64_t> done(num_lanes, 0);
  for (std::size_t position = 0; position < rows.size() + index(most); ++position) {
    const int64_t round = position < rows.size() ? rows[position] : kNoRound;
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {
      const std::size_t ring = round == kNoRound ? kNoRing : seating.rounds[index(round)][lane];
      if (ring == kNoRing || seating.rings[ring].alone) {
        if (done[lane] < num_own[lane]) on_own(lane, done[lane]++);
      } else if (index(seating.rings[ring].lanes.front()) == lane) {
        on_ring(ring);
      }
    }
  }
}

// Shares, at speed 1, that sum to total_s over all ranks and level the time of rings and shorts.
std::vector<double> first_shares(const Seating& seating, double total_s);

// Shares that move from lanes that end late to those that end early, where `had` was each one's
// share. On a stage of a pipeline a second more takes 1 / stages of a second.
std::vector<double> next_shares(const Seating& seating, const std::vector<double>& had,
                                const std::vector<double>& ends, int64_t stages, double total_s);

// The slots of lanes between and behind their rings.
class OwnSlots {
 public:
  // Slots that stand in no group with a ring take about unit_s.
  OwnSlots(const Problem& problem, const Seating& seating, const Shorts& shorts, const Rows& rows,
           double unit_s);

  // Slots of all ranks before their last rings that are empty at first and may not stay so.
  double num_needed() const { return num_needed_; }

  // So many seconds of short sequences, at speed 1: in the groups of rings as much as makes a slot
  // take the time of the longest of them, if that fits a rank; in the others as much as makes them
  // alike. Counts that must be multiples of a group are made so by more and lighter slots.
  std::vector<Slot> of(std::size_t lane, double share_s) const;

  // Adds `wanted_s` of the same slots.
  void add_wanted_s(std::size_t lane, double share_s, std::vector<double>& wanted_s) const;

 private:
  struct Lane {
    std::vector<Slot> slots;      // wanted_s as said above in groups of rings, else 0
    int64_t before_longest = 0;   // slots before its longest ring
    double beside_s = 0;          // short sequences of slots in groups of rings
    std::vector<double> bases_s;  // of the other slots, ascending
  };

  // What a share makes of a lane's slots.
  struct Levels {
    double beside = 1;     // the part that slots beside rings get of what they lack
    double level_s = 0;    // up to which the others are filled
    std::size_t more = 0;  // slots behind the last ring

    double wanted_s(const Slot& slot) const {
      if (slot.wanted_s == 0) return std::max(slot.base_s, level_s);
      return slot.base_s + beside * (slot.wanted_s - slot.base_s);
    }
  };

  Levels levels(const Lane& lane, std::size_t at, double share_s) const;

  Lane lane_of(const Seating& seating, const Rows& rows, std::size_t lane) const;
  double num_more(double free_s, double bin_s) const;

  const Shorts& shorts_;
  std::size_t group_;
  double unit_s_;
  double num_needed_ = 0;
  std::vector<double> speed_;  // by lane
  std::vector<Lane> lanes_;
};

}  // namespace hdp
