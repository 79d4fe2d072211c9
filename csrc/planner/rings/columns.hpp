// dp-balance: where a wide ring fills a column of ranks up to a given clock.
#pragma once

#include <cstdint>

#include "planner/rings/batch.hpp"
#include "planner/rings/free_ranks.hpp"

namespace hdp {

// A group of free ranks and how many of them to take; degree 0 if no group has room.
struct Column {
  std::size_t group = 0;
  int64_t degree = 0;
};

// A sequence of compute c fills the column between a group's clock and `until_s` with c divided by
// that time ranks, if that many may share it; else with as many as memory needs. The group in which
// the least time is left above.
Column best_column(const Batch& batch, const FreeRanks& free, std::size_t place, double until_s);

}  // namespace hdp
