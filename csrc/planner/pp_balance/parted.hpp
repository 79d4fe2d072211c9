// pp-balance where micro-batches may run in parts.
#pragma once

#include "planner/pp_balance/draft.hpp"
#include "planner/rings/batch.hpp"

namespace hdp {

// A long micro-batch in parts costs little more than its work, so ranks are levelled as without
// stages: rings as narrow as the makespan allows, placed by clocks, short sequences fill up. Tries
// a few prices of a part's time and shares of the makespan that a sequence may take.
PipelineDraft in_parts(const Batch& batch);

}  // namespace hdp
