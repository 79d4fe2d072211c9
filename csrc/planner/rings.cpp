#include "planner/rings.hpp"

#include <algorithm>
#include <cmath>

#include "planner/cost_model.hpp"
#include "planner/node_clocks.hpp"
#include "planner/schedule.hpp"
#include "planner/slices.hpp"
#include "planner/spare_room.hpp"

namespace hdp {
namespace {

int64_t length_of(const Problem& problem, int64_t id) {
  return problem.lengths[static_cast<std::size_t>(id)];
}

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

int64_t balanced_degree(const Problem& problem, int64_t length, double longest_s) {
  const int64_t least = least_degree(length, problem.tokens_per_rank, problem.slice_multiple);
  const double wanted = std::ceil(compute_s(problem.cost, length) / longest_s);
  const int64_t useful = std::min(greatest_hidden_degree(problem.cost, length, problem.num_ranks),
                                  length / (2 * problem.slice_multiple));
  // the negated form sends the NaN of a cost model without times to the memory minimum
  if (!(wanted > static_cast<double>(least)) || useful <= least) return least;
  const int64_t degree =
      wanted < static_cast<double>(useful) ? static_cast<int64_t>(wanted) : useful;
  const int64_t slice = slice_tokens(length, degree, problem.slice_multiple);
  return slice <= problem.tokens_per_rank ? degree : least;
}

RingSchedule place_rings(const Problem& problem, const std::vector<int64_t>& order,
                         const RingPolicy& policy) {
  RingSchedule schedule;
  std::vector<int64_t> degrees;
  std::vector<int64_t> longs;
  for (const int64_t id : order) {
    const int64_t degree = balanced_degree(problem, length_of(problem, id), policy.longest_s);
    (degree > 1 ? longs : schedule.shorts).push_back(id);
    if (degree > 1) degrees.push_back(degree);
  }
  NodeClocks clocks(problem.num_ranks, problem.cost.ranks_per_node);
  SpareRoom spare_room(problem, policy.fill_spare_room ? schedule.shorts : std::vector<int64_t>{});
  for (std::size_t i = 0; i < longs.size(); ++i) {
    const int64_t length = length_of(problem, longs[i]);
    schedule.rings.push_back({longs[i], clocks.earliest(degrees[i]), {}});
    Ring& ring = schedule.rings.back();
    const double start = start_ring(schedule, clocks);
    const bool one_node = in_one_node(ring.ranks, problem.cost.ranks_per_node);
    double seconds = ring_s(problem.cost, length, degrees[i], one_node) + problem.cost.g;
    if (policy.fill_spare_room) {
      const int64_t slice = slice_tokens(length, degrees[i], problem.slice_multiple);
      seconds += spare_room.fill(ring.ranks, problem.tokens_per_rank - slice, ring.locals);
    }
    clocks.set(ring.ranks, start + seconds);
  }
  if (policy.fill_spare_room) schedule.shorts = spare_room.remaining();
  schedule.clocks = clocks.all();
  return schedule;
}

}  // namespace hdp
