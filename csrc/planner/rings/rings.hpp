// dp-balance, first half: the long sequences, each a ring, in launch order.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/rings/batch.hpp"
#include "planner/rings/degrees.hpp"
#include "planner/rings/place_set.hpp"

namespace hdp {

// What dp-balance decides freely; everything else follows by list scheduling.
struct Decisions {
  Degrees degrees;
  bool fill_spare_room = false;  // put whole short sequences on ring members
  double least_speed = 0;        // slower ranks join only the rings that need them
  bool alike_speeds = false;     // rings of ranks of alike speed rather than of one node
  double column_s = 0;  // if not 0: wide rings fill columns up to this clock, see columns.hpp
};

// Whether the sequence is placed as a ring: it is shared, or too long to be packed with others.
bool is_ring(const Problem& problem, int64_t length, int64_t degree);

// Places of the sequences that are no rings.
PlaceSet places_of_shorts(const Batch& batch, const Degrees& degrees);

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
    return {ranks.begin() + static_cast<std::ptrdiff_t>(offsets[i]),
            ranks.begin() + static_cast<std::ptrdiff_t>(offsets[i + 1])};
  }
};

// Wide rings first, of equal degrees the longer sequence first; each on the ranks that are free
// first, in one node if it fits into one.
RingSchedule place_rings(const Batch& batch, const Decisions& decisions);

}  // namespace hdp
