// dp-balance: how many ranks may share a sequence, and how many should at first.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/types.hpp"

namespace hdp {

using Degrees = std::vector<int64_t>;  // by sequence id

// Whether `degree` ranks hold the sequence in chunks of at least slice_multiple tokens; shorter
// ones are for its memory minimum only.
bool may_share(const Problem& problem, int64_t length, int64_t degree);

// The degree of a sequence: its memory minimum, raised while its own time exceeds longest_s, but
// not so far that its traffic is exposed or its chunks become shorter than slice_multiple.
int64_t balanced_degree(const Problem& problem, int64_t length, double longest_s);

Degrees balanced_degrees(const Problem& problem, double longest_s);

// Gives every ring of more than half of the ranks all of them: two such rings never run side by
// side, so that the ranks left out would wait.
Degrees widened(const Problem& problem, Degrees degrees);

}  // namespace hdp
