// dp-balance, second half: the short sequences, packed into micro-batches of one rank.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/types.hpp"
#include "planner/rings/rings.hpp"

namespace hdp {

struct ShortsStyle {
  int64_t lead = 0;  // micro-batches of short sequences that every rank runs before the rings
  double room = 1;   // the part of the capacity that a micro-batch of short sequences may fill
};

// The whole plan: each ring preceded by the micro-batches that fill the gaps before it, then the
// micro-batches that level the ranks' clocks. `shorts`: places of the sequences; `locals`: what
// fills the rings' spare room. Empty if a rank gets fewer micro-batches than shall lead.
Plan place_shorts(const Batch& batch, const RingSchedule& schedule, const PlaceSet& shorts,
                  const ShortsStyle& style = {}, Locals locals = {});

}  // namespace hdp
