// ep-balance: the sequences that one domain runs, dealt into positions.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/ep_balance/cells.hpp"

namespace hdp {

// What the ranks of a domain run at one position.
using Row = std::vector<Cell>;

// Each row takes the longest sequences that are left, as many as let all of its cells take the same
// time: those of few ranks have more short sequences, or less memory in use. So time is lost only
// in the last cells' last gaps, which the shortest sequences fill.
class Rows {
 public:
  // Ranks `first` to `first` + `size` - 1. `dense`: the problem without experts' time.
  Rows(const Problem& dense, int32_t first, int64_t size);

  // All of them. Every sequence fits on all ranks together.
  std::vector<Row> deal(const Items& items) const;

 private:
  friend class Dealer;

  const Problem& problem_;
  int32_t first_;
  int64_t size_;
  int64_t cell_size_;  // ranks whose ring hides the traffic of a sequence that fills one rank
};

}  // namespace hdp
