#include "planner/schedule/ways.hpp"

#include <stdexcept>
#include <string>

#include "planner/base/memory.hpp"
#include "planner/base/stream.hpp"

namespace hdp {

double sequence_s(const Problem& problem, int64_t length, int64_t degree,
                  const std::vector<PartSize>& sizes, Links links, double speed) {
  if (const auto stream = stream_of(problem, length, degree)) {
    return stream_s(problem, length, degree, *stream, links, speed);
  }
  const bool twice = recomputes(problem, length, degree);
  return twice ? recomputed_ring_s(problem.cost, length, degree, sizes, links, speed)
               : ring_s(problem.cost, length, degree, sizes, links, speed);
}

double sequence_s(const Problem& problem, int64_t length, int64_t degree, Links links,
                  double speed) {
  if (may_compute_twice(problem)) {
    const auto s = static_cast<double>(length);
    return sequence_s(problem, length, degree, {{s, 0, s * s}}, links, speed);
  }
  return ring_s(problem.cost, length, degree, links, speed) + fixed_s(problem.cost, degree) / speed;
}

void add_sequence(const Problem& problem, const std::vector<int32_t>& ring, SequenceId id,
                  Plan& plan) {
  const int64_t length = problem.lengths[index(id)];
  const auto degree = static_cast<int64_t>(ring.size());
  if (const auto ratio = offload_ratio(problem, length, degree)) {
    plan.add(ring, {id}, *ratio);
  } else if (const auto stream = stream_of(problem, length, degree)) {
    plan.add_stream(ring, id, stream->num_parts, stream->host_parts);
  } else if (recomputes(problem, length, degree)) {
    plan.add(ring, {id});
    plan.recompute_last();
  } else {
    throw std::invalid_argument("sequence " + std::to_string(id) + " of " + std::to_string(length) +
                                " tokens fits on " + std::to_string(degree) +
                                " ranks in no way: raise tokens_per_rank, or use offload=\"auto\"");
  }
}

}  // namespace hdp
