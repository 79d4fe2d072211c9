// ep-balance: the sequences that one domain runs, dealt into slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "planner/ep_balance/rank_groups.hpp"
#include "planner/ep_balance/slot_filler.hpp"

namespace hdp {

// Rows differ in time, the groups of a row do not: so time is lost only in the last groups' last
// gaps, which the shortest sequences fill. One stretch of one domain after the other: what this
// needs it allocates once.
class Rows {
 public:
  // `dense`: the problem without experts' time.
  Rows(const Problem& dense, const Items& items)
      : size_(static_cast<double>(dense.expert_ranks)),
        filler_(dense, items),
        sharing_(dense, items) {}

  // Deals all items, which may be others than before, on the domain that begins with this rank.
  void start(int32_t first) {
    first_ = first;
    filler_.start();
  }

  // The next row, or null where all items are dealt. Every item fits on all ranks together.
  const Row* next();

 private:
  void try_heights(const Target& found);
  void share(Draft& draft, Row& row, double most);
  double wasted(const Row& row) const;

  double size_;  // ranks of a domain
  int32_t first_ = 0;
  SlotFiller filler_;
  GroupSharing sharing_;
  Row best_;
  double least_waste_ = 0;
  // Of other heights:
  Row row_;
  std::vector<Draft> drafts_;
  std::vector<std::pair<double, std::size_t>> order_;  // (waste, draft)
};

}  // namespace hdp
