// Refuses problems that no plan can answer, naming what was found, expected and the remedy.
#pragma once

#include "planner/base/types.hpp"

namespace hdp {

// Throws std::invalid_argument for a malformed problem or one with a sequence that does not fit.
void check(const Problem& problem);

// The degree of the static mesh: the least divisor of the number of ranks at which a sequence of
// max_length tokens fits; 0 if there is none.
int64_t static_degree(const Problem& problem);

}  // namespace hdp
