// pp-balance, second part: which ranks each ring gets.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/types.hpp"
#include "planner/pp_balance/rounds.hpp"

namespace hdp {

constexpr std::size_t kNoRing = index(-1);

// A ring with its lanes, ascending. A lane is a rank, or stands for several ranks that are alike.
struct SeatedRing {
  SequenceId sequence = 0;
  std::size_t place = 0;  // of the sequence among all, longest first
  double seconds = 0;     // of its slowest member
  bool alone = false;     // each rank has a sequence for itself, and room for short ones
  std::vector<int32_t> lanes;
  int32_t num_parts = 1;
};

struct Seating {
  std::vector<SeatedRing> rings;
  std::vector<std::vector<std::size_t>> rounds;  // by round, then lane: index into rings or kNoRing
  std::vector<double> ring_s;                    // by lane: seconds of all its rings
  std::vector<double> speed;                     // by lane
  std::vector<double> weight;                    // by lane: how many ranks it stands for
};

// How the long sequences are dealt into rounds. Times are in seconds.
struct DealingRule {
  double level_s = 0;  // of a round, if degrees allow it
  double grade = 0;    // a round takes at least this part of the time of the one before
  double most_s = 0;   // a rank with so much to do takes part in no more rounds if others suffice
  int64_t group = 1;   // so many rounds take alike times, if degrees allow it
};

// Deals and seats round after round, the longest first, on ranks that have the least to do so far,
// in whole nodes where that is possible. Slow ranks get no rings if others suffice. Lanes are
// ranks.
Seating seat(const Problem& problem, const std::vector<LongSequence>& sequences,
             const DealingRule& dealing);

// Every sequence on all ranks, a round each.
Seating seat_on_all(const Problem& problem, const std::vector<LongSequence>& sequences);

// Ranks of the same speed and in the same rings become one lane.
struct Outline {
  Seating seating;
  std::vector<std::size_t> lane_of_rank;
};

Outline outline(const Seating& seating);

}  // namespace hdp
