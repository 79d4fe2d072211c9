#include "planner/dp_balance/levels.hpp"

#include <algorithm>

#include "planner/dp_balance/clock_heap.hpp"

namespace hdp {

Level estimate(const Batch& batch, const Decisions& decisions, const RingSchedule& schedule) {
  const Problem& problem = batch.problem;
  ClockHeap ranks(schedule.clocks);
  std::vector<int32_t> owners(batch.num_big, -1);
  for (std::size_t place = 0; place < batch.num_big; ++place) {
    if (is_ring(problem, batch.length(place), decisions.degrees[place])) continue;
    const double share_of_fixed = fixed_s(problem.cost, 1) *
                                  static_cast<double>(batch.length(place)) /
                                  static_cast<double>(problem.tokens_per_rank);
    const double speed = problem.speed(ranks.rank(0));
    owners[place] = ranks.rank(0);
    ranks.advance(0, ranks.clock(0) + (batch.compute_s(place) + share_of_fixed) / speed);
  }
  Level result;
  double latest = 0;
  double done = batch.small_s;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks.clock(i) > latest) {
      latest = ranks.clock(i);
      result.latest_rank = ranks.rank(i);
    }
    done += ranks.clock(i) * problem.speed(ranks.rank(i));
  }
  const double level = done / batch.total_speed;
  result.makespan_s = std::max(latest, level);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    result.excess_s += std::max(0.0, ranks.clock(i) - level);
  }
  for (std::size_t place = 0; place < owners.size(); ++place) {
    if (owners[place] == result.latest_rank) result.singles.push_back(place);
  }
  return result;
}

}  // namespace hdp
