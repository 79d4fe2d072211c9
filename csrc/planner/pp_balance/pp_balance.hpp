// The way into pp-balance.
#pragma once

#include "planner/base/types.hpp"

namespace hdp {

// For pipelines: every micro-batch at one position in the lists of its ranks, alike times side by
// side and one after the other, less work for ranks in long rings (they wait for these to pass all
// stages), light micro-batches first. Searches for the arrangement of rounds of rings on sketches
// in which short sequences are a fluid; works out the best. Never slower than the other two where
// they keep the rule of positions.
Plan pp_balance(const Problem& problem);

}  // namespace hdp
