// The sequences of a problem, longest first: sorted once for all drafts.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/cost_model.hpp"
#include "planner/base/sorting.hpp"
#include "planner/base/types.hpp"

namespace hdp {

struct Batch {
  // With `twice` sequences begin on few ranks, recomputed or as streams, where they may be; else
  // only those that no ring holds.
  explicit Batch(const Problem& problem, bool twice = false);

  // Of the sequence at a place in the order.
  int64_t length(std::size_t place) const { return lengths[place]; }

  // Its time on one rank of speed 1.
  double compute_s(std::size_t place) const { return hdp::compute_s(problem.cost, lengths[place]); }

  const Problem& problem;
  std::vector<SequenceId> order;
  SortedLengths lengths;       // by place in the order
  std::size_t num_big = 0;     // the first places: each matters by itself
  // Degrees of the big ones:
  std::vector<int32_t> least;         // by memory, computed twice where it may be
  std::vector<int32_t> least_whole;   // the same of a ring; more than there are ranks if none holds it
  std::vector<int32_t> hidden;        // the greatest that hides the traffic
  std::vector<int32_t> short_enough;  // the least from there on at which it takes own_time_s
  double total_s = 0;          // compute of all
  double small_s = 0;          // compute of all but the big ones, and a share of fixed_s
  double total_speed = 1;      // of all ranks
  double bound_s = 0;          // no earlier can all clocks be
  double own_time_s = 0;       // a sequence should not take longer by itself
  double share_s = 0;          // total_s / total_speed
  // A pipeline of P stages that runs micro-batches of alike times ends after 1/P of their sum and
  // (P - 1)/P of one of them. In units of 1/P: a rank's clock is what it has to do, and `ramp`
  // times the longest of it, at least full_s.
  double ramp = 0;    // P - 1
  double full_s = 0;  // a micro-batch of one sequence that fills a rank
};

}  // namespace hdp
