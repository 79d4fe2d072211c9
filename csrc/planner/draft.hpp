// From decisions to a plan.
#pragma once

#include "planner/batch.hpp"
#include "planner/rings.hpp"
#include "planner/schedule.hpp"

namespace hdp {

Scheduled draft(const Batch& batch, const Decisions& decisions);

}  // namespace hdp
