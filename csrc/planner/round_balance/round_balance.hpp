// The way into round-balance.
#pragma once

#include "planner/base/types.hpp"

namespace hdp {

// In the form of Megatron-LM's dynamic context parallelism (rounds, in each of which every rank runs
// one micro-batch on an aligned power of two of ranks), but planned over all rounds at once: wide
// groups run first, so that no rank waits for another before the end, and sequences go where ranks
// end first. Never slower than dynamic_cp. Throws std::invalid_argument as that does.
Plan round_balance(const Problem& problem);

}  // namespace hdp
