// round-balance, second part: which block takes each sequence.
#pragma once

#include <vector>

#include "planner/base/types.hpp"
#include "planner/round_balance/blocks.hpp"

namespace hdp {

struct Dealing {
  Blocks blocks;
  std::vector<std::vector<SequenceId>> sequences;  // by block, longest first
  double end_s = 0;                                // when the last rank ends
};

// Longest first, each to a block of the least degree at which it ends within a level, else of the
// degree at which it ends first; at last those that take a small part of the level, whole, where
// least is to do. Of several levels the one under which the last rank ends first. A sequence keeps
// its place if blocks become wider later. `order` holds all ids, longest first; the longest must
// fit on the widest block.
Dealing dealt(const Problem& problem, const std::vector<SequenceId>& order);

}  // namespace hdp
