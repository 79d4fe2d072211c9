#include "planner/ep_balance/domains.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "planner/base/slices.hpp"
#include "planner/dp_balance/dp_balance.hpp"
#include "planner/ep_balance/cells.hpp"

namespace hdp {
namespace {

std::size_t index(int64_t value) { return static_cast<std::size_t>(value); }

// A domain computes as its ranks together, but each of them receives all that a ring sends.
CostModel cost_of_domain(const CostModel& rank, int64_t size) {
  const auto ranks = static_cast<double>(size);
  CostModel cost = rank;
  cost.a /= ranks;
  cost.b /= ranks;
  cost.attention_b /= ranks;
  if (!rank.attention.empty()) {
    std::vector<AttentionPoint> points = rank.attention.points();
    for (AttentionPoint& point : points) point.seconds /= ranks;
    cost.attention = AttentionTable(std::move(points));
  }
  cost.g = 0;
  cost.b_experts = 0;
  cost.block_s *= ranks;
  cost.intra_node_hop_s *= ranks;
  cost.inter_node_hop_s *= ranks;
  cost.ranks_per_node = std::max<int64_t>(1, rank.ranks_per_node / size);
  return cost;
}

std::vector<double> speeds_of_domains(const Problem& problem) {
  std::vector<double> speeds;
  if (problem.speeds.empty()) return speeds;
  const int64_t size = problem.expert_ranks;
  for (auto first = problem.speeds.begin(); first != problem.speeds.end(); first += size) {
    speeds.push_back(std::accumulate(first, first + size, 0.0) / static_cast<double>(size));
  }
  return speeds;
}

}  // namespace

DomainPlan plan_domains(const Problem& problem) {
  DomainPlan result;
  const int64_t size = problem.expert_ranks;
  const int64_t num_domains = problem.num_ranks / size;
  const int64_t room = ring_room(problem);
  std::vector<SequenceId> ids;
  std::vector<int64_t> lengths;
  for (std::size_t i = 0; i < problem.lengths.size(); ++i) {
    const int64_t length = problem.lengths[i];
    const auto id = static_cast<SequenceId>(i);
    const bool is_whole =
        slice_tokens(length, 1, problem.slice_multiple) <= problem.tokens_per_rank;
    if (!is_whole && length > problem.num_ranks * room) {
      result.too_long.push_back(id);
    } else {
      ids.push_back(id);
      lengths.push_back(length);
    }
  }
  if (ids.empty()) return result;
  if (num_domains == 1) {
    result.parts.push_back({{0}, std::move(ids)});
    return result;
  }
  Problem domains;
  // Slices of a ring of domains are padded on every rank. Without room for rings all sequences are
  // whole.
  domains.slice_multiple = size * problem.slice_multiple;
  domains.tokens_per_rank = size * std::max(room, problem.slice_multiple);
  domains.max_length = *std::max_element(lengths.begin(), lengths.end());
  domains.lengths = std::move(lengths);
  domains.num_ranks = num_domains;
  domains.effort = problem.effort;
  domains.speeds = speeds_of_domains(problem);
  domains.cost = cost_of_domain(problem.cost, size);
  const Plan plan = dp_balance(domains).plan;
  for (int64_t m = 0; m < plan.num_micro_batches(); ++m) {
    DomainPlan::Part part;
    part.domains.assign(plan.ranks.begin() + plan.rank_offsets[index(m)],
                        plan.ranks.begin() + plan.rank_offsets[index(m) + 1]);
    for (auto i = plan.sequence_offsets[index(m)]; i < plan.sequence_offsets[index(m) + 1]; ++i) {
      part.sequences.push_back(ids[index(plan.sequences[index(i)])]);
    }
    if (!part.sequences.empty()) result.parts.push_back(std::move(part));
    for (int32_t i = plan.local_offset(m); i < plan.local_offset(m + 1); ++i) {
      const SequenceId id = ids[index(plan.locals.sequences[index(i)])];
      result.parts.push_back({{plan.locals.ranks[index(i)]}, {id}});
    }
  }
  return result;
}

}  // namespace hdp
