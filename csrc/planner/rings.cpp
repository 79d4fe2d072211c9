#include "planner/rings.hpp"

#include <algorithm>

#include "planner/cost_model.hpp"
#include "planner/node_clocks.hpp"
#include "planner/schedule.hpp"
#include "planner/slices.hpp"
#include "planner/spare_room.hpp"

namespace hdp {
namespace {

// Starts the ring on the ranks that are free first and records how long each of them waited.
double start_ring(RingSchedule& schedule, const NodeClocks& clocks) {
  const Ring& ring = schedule.rings.back();
  double start = 0;
  for (const int32_t rank : ring.ranks) start = std::max(start, clocks.at(rank));
  for (const int32_t rank : ring.ranks) {
    const double waited = start - clocks.at(rank);
    if (waited > 0) schedule.gaps.push_back({schedule.rings.size() - 1, rank, waited});
  }
  return start;
}

}  // namespace

RingSchedule place_rings(const Problem& problem, const std::vector<int64_t>& order,
                         const Degrees& degrees, bool fill_spare_room) {
  RingSchedule schedule;
  std::vector<int64_t> longs;
  for (const int64_t id : order) {
    (degrees[static_cast<std::size_t>(id)] > 1 ? longs : schedule.shorts).push_back(id);
  }
  NodeClocks clocks(problem.num_ranks, problem.cost.ranks_per_node);
  SpareRoom spare_room(problem, fill_spare_room ? schedule.shorts : std::vector<int64_t>{});
  for (const int64_t id : longs) {
    const int64_t length = problem.lengths[static_cast<std::size_t>(id)];
    const int64_t degree = degrees[static_cast<std::size_t>(id)];
    schedule.rings.push_back({id, clocks.earliest(degree), {}});
    Ring& ring = schedule.rings.back();
    const double start = start_ring(schedule, clocks);
    const bool one_node = in_one_node(ring.ranks, problem.cost.ranks_per_node);
    double seconds = ring_s(problem.cost, length, degree, one_node) + problem.cost.g;
    if (fill_spare_room) {
      const int64_t slice = slice_tokens(length, degree, problem.slice_multiple);
      seconds += spare_room.fill(ring.ranks, problem.tokens_per_rank - slice, ring.locals);
    }
    clocks.set(ring.ranks, start + seconds);
  }
  if (fill_spare_room) schedule.shorts = spare_room.remaining();
  schedule.clocks = clocks.all();
  return schedule;
}

}  // namespace hdp
