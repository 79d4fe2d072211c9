// dp-balance, first half: the long sequences, each a ring, in launch order.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "planner/base/place_set.hpp"
#include "planner/rings/batch.hpp"
#include "planner/rings/degrees.hpp"
#include "planner/rings/free_ranks.hpp"

namespace hdp {

// What dp-balance decides freely; everything else follows by list scheduling.
struct Decisions {
  Degrees degrees;
  bool fill_spare_room = false;  // put whole short sequences on ring members
  double least_speed = 0;        // slower ranks join only the rings that need them
  bool alike_speeds = false;     // rings of ranks of alike speed rather than of one node
  double column_s = 0;  // if not 0: wide rings fill columns up to this clock, see best_column
};

// Whether the sequence is placed as a ring: it is shared, or too long to be packed with others.
bool is_ring(const Problem& problem, int64_t length, int64_t degree);

// Places of the sequences that are no rings.
PlaceSet places_of_shorts(const Batch& batch, const Degrees& degrees);

// A group of free ranks and how many of them to take; degree 0 if no group has room.
struct Column {
  std::size_t group = 0;
  int64_t degree = 0;
};

// Where a wide ring fills a column of ranks up to a given clock: a sequence of compute c fills the
// column between a group's clock and `until_s` with c divided by that time ranks, if that many may
// share it; else with as many as memory needs. The group in which the least time is left above.
Column best_column(const Batch& batch, const FreeRanks& free, std::size_t place, double until_s);

// Fills the spare room of ring members with whole short sequences, so that they need no
// micro-batch (and no g) of their own.
class SpareRoom {
 public:
  // May place the sequences at `shorts`, places in the batch.
  SpareRoom(const Batch& batch, PlaceSet shorts);

  // Gives each member up to `room` padded tokens of alike time, appends which, and returns the
  // seconds that the ring takes longer. The time goes round by round: the first member sets a
  // round's length, the others are filled up to it.
  double fill(const std::vector<int32_t>& ranks, int64_t room, Locals& locals);

  // The places of the sequences not placed.
  PlaceSet take_remaining() { return std::move(shorts_); }

 private:
  struct Member {
    int64_t room = 0;
    double seconds = 0;
    std::vector<SequenceId> sequences;
  };

  bool place_longest(Member& member, int64_t longest);

  const Batch& batch_;
  PlaceSet shorts_;
};

// Time in which a rank waits for the other members of a ring.
struct Gap {
  std::size_t ring = 0;  // index of the ring that comes after it
  int32_t rank = 0;
  double seconds = 0;
};

struct RingSchedule {
  std::vector<std::size_t> places;      // of the sequence of each ring
  std::vector<std::size_t> offsets{0};  // ring i has the ranks [offsets[i], offsets[i + 1])
  std::vector<int32_t> ranks;           // ascending in each ring
  std::vector<Gap> gaps;                // in the order of their rings
  std::vector<double> clocks;           // when each rank is free, see Batch::ramp
  // If spare room is filled:
  Locals locals;                        // of the rings, one after the other
  std::vector<std::size_t> local_ends;  // of each ring
  PlaceSet shorts;                      // places of the sequences that remain

  std::vector<int32_t> ring(std::size_t i) const {
    return {at(ranks, offsets[i]), at(ranks, offsets[i + 1])};
  }
};

// Wide rings first, of equal degrees the longer sequence first; each on the ranks that are free
// first, in one node if it fits into one.
RingSchedule place_rings(const Batch& batch, const Decisions& decisions);

}  // namespace hdp
