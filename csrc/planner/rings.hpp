// dp-balance, first half: the long sequences, each a ring, in launch order.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/types.hpp"

namespace hdp {

struct RingPolicy {
  double longest_s = 0;          // a sequence's degree is raised while its time exceeds this
  bool fill_spare_room = false;  // put whole short sequences on ring members
};

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

// The degree of a sequence: its memory minimum, raised while its own time exceeds longest_s, but
// not so far that its traffic is exposed or its chunks become shorter than slice_multiple.
int64_t balanced_degree(const Problem& problem, int64_t length, double longest_s);

// `order` holds all sequence ids, longest first.
RingSchedule place_rings(const Problem& problem, const std::vector<int64_t>& order,
                         const RingPolicy& policy);

}  // namespace hdp
