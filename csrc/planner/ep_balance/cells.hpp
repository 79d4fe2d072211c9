// ep-balance: some neighbouring ranks at one position, and how they share what they are given.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "planner/base/types.hpp"

namespace hdp {

// A sequence without what experts compute: that is shared by the domain whoever owns the tokens.
struct Item {
  SequenceId id = 0;
  int64_t length = 0;
  double dense_s = 0;  // on one rank of speed 1
};

// Longest first.
using Items = std::vector<Item>;
using Places = std::vector<std::size_t>;  // in Items, ascending

struct Cell {
  int32_t first = 0;  // rank
  int64_t num_ranks = 1;
  Places sharded;                                       // over all of its ranks
  std::vector<std::pair<int32_t, std::size_t>> locals;  // (rank, place): whole; ascending
  Places left;                                          // what found no room
  double seconds = 0;                                   // of the slowest rank
  double dense_s = 0;                                   // of all that is placed
};

// The longest of the given sequences are sharded over all ranks, the others placed whole, longest
// first, each on the least loaded rank that has room. So many are sharded as lose least: with more
// the ranks' times are more alike, but traffic may be exposed.
Cell shared_cell(const Problem& dense, const Items& items, int32_t first, int64_t num_ranks,
                 const Places& given);

// Tokens that a rank can hold of sharded sequences, padding included.
int64_t ring_room(const Problem& problem);

}  // namespace hdp
