// pp-balance, another way: rings of nested degrees. Every member of such a ring has had the same
// rings before, so that it stands at one position in all of their lists.
#pragma once

#include "planner/pp_balance/draft.hpp"
#include "planner/rings/batch.hpp"

namespace hdp {

// The fastest of a few; no plan if there is none that pipelines can run.
PipelineDraft nested_draft(const Batch& batch);

}  // namespace hdp
