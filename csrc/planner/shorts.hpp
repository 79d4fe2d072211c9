// dp-balance, second half: the short sequences, packed into micro-batches of one rank.
#pragma once

#include <vector>

#include "planner/rings.hpp"
#include "planner/types.hpp"

namespace hdp {

// The whole plan: each ring preceded by the micro-batches that fill the gaps before it, then the
// micro-batches that level the ranks' clocks.
Plan place_shorts(const Problem& problem, RingSchedule schedule);

}  // namespace hdp
