// pp-balance: the rounds in an order, and what every lane runs between its rings.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "planner/pp_balance/seats.hpp"

namespace hdp {

// Row after row: the round that stands there, or kNoRound where every lane runs a micro-batch of
// its own. A row is a position: a lane with a ring in it needs a micro-batch in each row before.
using Rows = std::vector<int64_t>;

constexpr int64_t kNoRound = -1;

// The micro-batches of its own that each lane needs before its last ring.
inline std::vector<int64_t> own_needed(const Seating& seating, const Rows& rows) {
  std::vector<int64_t> needed(seating.ring_s.size(), 0);
  std::vector<int64_t> so_far(seating.ring_s.size(), 0);
  for (const int64_t round : rows) {
    for (std::size_t lane = 0; lane < needed.size(); ++lane) {
      if (round != kNoRound && seating.rounds[static_cast<std::size_t>(round)][lane] != kNoRing) {
        needed[lane] = so_far[lane];
      } else {
        ++so_far[lane];
      }
    }
  }
  return needed;
}

// Calls on_ring(ring) once for each ring and on_own(lane, i) for the i-th of num_own[lane]
// micro-batches of a lane's own, position after position; num_own is at least own_needed().
template <typename OnRing, typename OnOwn>
void in_launch_order(const Seating& seating, const Rows& rows, const std::vector<int64_t>& num_own,
                     const OnRing& on_ring, const OnOwn& on_own) {
  const std::size_t num_lanes = seating.ring_s.size();
  const int64_t most = *std::max_element(num_own.begin(), num_own.end());
  std::vector<int64_t> done(num_lanes, 0);
  for (std::size_t position = 0; position < rows.size() + static_cast<std::size_t>(most);
       ++position) {
    const int64_t round = position < rows.size() ? rows[position] : kNoRound;
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {
      const std::size_t ring =
          round == kNoRound ? kNoRing : seating.rounds[static_cast<std::size_t>(round)][lane];
      if (ring == kNoRing) {
        if (done[lane] < num_own[lane]) on_own(lane, done[lane]++);
      } else if (static_cast<std::size_t>(seating.rings[ring].lanes.front()) == lane) {
        on_ring(ring);
      }
    }
  }
}

}  // namespace hdp
