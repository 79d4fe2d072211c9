// ep-balance: the micro-batches of a plan, made in any order.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/types.hpp"
#include "planner/ep_balance/rank_groups.hpp"

namespace hdp {

class MicroBatches {
 public:
  // A ring at a position of all its ranks.
  void add(int32_t position, const std::vector<int32_t>& ranks,
           const std::vector<SequenceId>& sequences, double offload_ratio);

  // What the groups have placed.
  void add(int32_t position, const Row& row, const Items& items) {
    for (const RankGroup& group : row.groups) add(position, row, group, items);
  }

  // By position, those of a position in the order in which they were made.
  Plan sorted() const;

 private:
  void add(int32_t position, const Row& row, const RankGroup& group, const Items& items);

  Plan made_;
  // Of a group:
  std::vector<int32_t> ranks_;
  std::vector<SequenceId> sequences_;
  std::vector<SequenceId> locals_;  // by rank
  std::vector<int32_t> ends_;       // in locals_, of each rank
};

}  // namespace hdp
