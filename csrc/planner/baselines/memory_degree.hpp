// How many ranks share a sequence where memory alone decides.
#pragma once

#include <cstdint>

#include "planner/base/types.hpp"

namespace hdp {

struct MemoryDegree {
  int64_t degree = 1;
  double offload_ratio = 0;
};

// The least degree by memory. The paper leaves open how far offload may lower it; here as far as
// the sequence takes no more than `share_s`, a rank's mean share of the compute: on fewer ranks it
// would outlast the others.
MemoryDegree memory_degree(const Problem& problem, int64_t length, double share_s);

}  // namespace hdp
