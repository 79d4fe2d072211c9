// What micro-batches take by themselves, and what a plan takes in all.
#pragma once

#include <cstdint>

#include "planner/base/types.hpp"

namespace hdp {

struct Schedule {
  double makespan_s = 0;
  double ring_tokens = 0;  // tokens that cross from one rank to the next, forward
  int64_t max_tokens_on_a_rank = 0;
  // In lockstep:
  int64_t num_positions = 0;  // of the longest list
  double padding_share = 0;   // of the places in all lists
};

// One micro-batch by itself.
struct MicroBatchLoad {
  double seconds = 0;            // of its slowest member
  double ring_tokens = 0;        // as in Schedule
  int64_t tokens_on_a_rank = 0;  // padded, of its fullest member
};

MicroBatchLoad micro_batch_load(const Problem& problem, const Plan& plan, int64_t micro_batch);

}  // namespace hdp
