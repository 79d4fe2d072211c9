// Refuses problems that no plan can answer, naming what was found, expected and the remedy.
#pragma once

#include "planner/base/types.hpp"

namespace hdp {

// Throws std::invalid_argument for a malformed problem or one with a sequence that does not fit.
void check(const Problem& problem);

}  // namespace hdp
