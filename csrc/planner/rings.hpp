// dp-balance, first half: the long sequences, each a ring, in launch order.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/degrees.hpp"
#include "planner/types.hpp"

namespace hdp {

struct Ring {
  int64_t sequence = 0;
  std::vector<int32_t> ranks;
  std::vector<Local> locals;
};

// Time in which a rank waits for the other members of a ring.
struct Gap {
  std::size_t ring = 0;  // index of the ring that comes after it
  int32_t rank = 0;
  double seconds = 0;
};

struct RingSchedule {
  std::vector<Ring> rings;
  std::vector<Gap> gaps;        // in the order of their rings
  std::vector<double> clocks;   // when each rank is free
  std::vector<int64_t> shorts;  // the sequences that remain, longest first
};

// `order` holds all sequence ids, longest first.
RingSchedule place_rings(const Problem& problem, const std::vector<int64_t>& order,
                         const Degrees& degrees, bool fill_spare_room);

}  // namespace hdp
