#include "planner/ep_balance/micro_batches.hpp"

#include <algorithm>
#include <numeric>

namespace hdp {
namespace {

// Numbers of micro-batches by position.
std::vector<int32_t> by_position(const std::vector<int32_t>& positions) {
  if (positions.empty()) return {};
  const int32_t last = *std::max_element(positions.begin(), positions.end());
  std::vector<std::size_t> starts(index(last) + 2, 0);
  for (const int32_t position : positions) ++starts[index(position) + 1];
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  std::vector<int32_t> order(positions.size());
  for (std::size_t m = 0; m < positions.size(); ++m) {
    order[starts[index(positions[m])]++] = static_cast<int32_t>(m);
  }
  return order;
}

}  // namespace

void MicroBatches::add(int32_t position, const std::vector<int32_t>& ranks,
                       const std::vector<SequenceId>& sequences, double offload_ratio) {
  made_.add(ranks, sequences, offload_ratio);
  made_.positions.push_back(position);
}

// A ring, or else a micro-batch of each rank that has sequences.
void MicroBatches::add(int32_t position, const Row& row, const RankGroup& group,
                       const Items& items) {
  sequences_.clear();
  ends_.assign(index(group.num_ranks) + 1, 0);
  for (std::size_t i = group.begin; i < group.end; ++i) {
    if (row.owners[i] >= 0) ++ends_[index(row.owners[i]) + 1];
    if (row.owners[i] == kSharded) sequences_.push_back(items[row.places[i]].id);
  }
  std::partial_sum(ends_.begin(), ends_.end(), ends_.begin());
  locals_.resize(index(ends_.back()));
  for (std::size_t i = group.begin; i < group.end; ++i) {
    if (row.owners[i] < 0) continue;
    locals_[index(ends_[index(row.owners[i])]++)] = items[row.places[i]].id;
  }
  const bool is_ring = !sequences_.empty();
  if (is_ring) {
    ranks_.resize(index(group.num_ranks));
    std::iota(ranks_.begin(), ranks_.end(), group.first);
    add(position, ranks_, sequences_, 0);
    made_.locals.sequences.insert(made_.locals.sequences.end(), locals_.begin(), locals_.end());
  }
  int32_t begin = 0;
  for (int32_t rank = 0; rank < group.num_ranks; ++rank) {
    const int32_t end = ends_[index(rank)];
    const auto num = index(end - begin);
    if (is_ring) {
      made_.locals.ranks.insert(made_.locals.ranks.end(), num, group.first + rank);
    } else if (num > 0) {
      ranks_.assign(1, group.first + rank);
      sequences_.assign(locals_.begin() + begin, locals_.begin() + end);
      add(position, ranks_, sequences_, 0);
    }
    begin = end;
  }
  made_.end_locals(made_.locals.sequences.size());
}

Plan MicroBatches::sorted() const {
  Plan plan;
  plan.reserve(index(made_.num_micro_batches()), made_.ranks.size(), made_.sequences.size());
  plan.positions.reserve(made_.positions.size());
  std::vector<int32_t> ranks;
  std::vector<SequenceId> sequences;
  for (const int32_t m : by_position(made_.positions)) {
    ranks.assign(made_.ring(m).first, made_.ring(m).last);
    sequences.assign(made_.sharded(m).first, made_.sharded(m).last);
    plan.add(ranks, sequences, made_.offload_ratio(m));
    const Locals& locals = made_.locals;
    const int32_t first = made_.local_offset(m);
    const int32_t last = made_.local_offset(m + 1);
    plan.locals.ranks.insert(plan.locals.ranks.end(), locals.ranks.begin() + first,
                             locals.ranks.begin() + last);
    plan.locals.sequences.insert(plan.locals.sequences.end(), locals.sequences.begin() + first,
                                 locals.sequences.begin() + last);
    plan.end_locals(plan.locals.sequences.size());
    plan.positions.push_back(made_.positions[index(m)]);
  }
  return plan;
}

}  // namespace hdp
