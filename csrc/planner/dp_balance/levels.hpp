// What a draft will take once the short sequences have levelled the ranks, without placing them.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/rings/batch.hpp"
#include "planner/rings/rings.hpp"

namespace hdp {

struct Level {
  double makespan_s = 0;
  double excess_s = 0;  // rank-seconds above the level: a measure of how much is in the way
  int32_t latest_rank = 0;
  std::vector<std::size_t> singles;  // places of the big sequences of degree 1 on that rank
};

// The big sequences of degree 1 are given to the ranks that are free first; the others fill up.
Level estimate(const Batch& batch, const Decisions& decisions, const RingSchedule& schedule);

}  // namespace hdp
