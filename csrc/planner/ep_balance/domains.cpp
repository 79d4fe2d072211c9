#include "planner/ep_balance/domains.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "planner/base/slices.hpp"
#include "planner/base/sorting.hpp"
#include "planner/dp_balance/dp_balance.hpp"
#include "planner/ep_balance/cells.hpp"
#include "planner/rings/batch.hpp"

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

// What domains run between rings, put together.
class Stretches {
 public:
  Stretches(std::size_t num_domains, std::size_t num_sequences)
      : open_(num_domains, kNone), stretch_of_(num_sequences, kNone) {}

  // The domain runs this sequence next.
  void add(int32_t domain, SequenceId id) {
    int32_t& stretch = open_[index(domain)];
    if (stretch == kNone) {
      stretch = static_cast<int32_t>(counts_.size());
      counts_.push_back(0);
      part_of_.push_back(0);
    }
    ++counts_[index(stretch)];
    stretch_of_[index(id)] = stretch;
  }

  // What the domain runs next comes behind the parts made so far, and what it ran before them.
  void end(int32_t domain, std::vector<DomainPlan::Part>& parts) {
    const int32_t stretch = std::exchange(open_[index(domain)], kNone);
    if (stretch == kNone) return;
    part_of_[index(stretch)] = parts.size();
    parts.push_back({{domain}, {}});
    parts.back().sequences.reserve(counts_[index(stretch)]);
  }

  // The parts get their sequences in this order, of places in `ids`.
  void fill(const std::vector<SequenceId>& order, const std::vector<SequenceId>& ids,
            std::vector<DomainPlan::Part>& parts) const {
    for (const SequenceId place : order) {
      const SequenceId id = ids[index(place)];
      const int32_t stretch = stretch_of_[index(id)];
      if (stretch != kNone) parts[part_of_[index(stretch)]].sequences.push_back(id);
    }
  }

 private:
  static constexpr int32_t kNone = -1;

  std::vector<int32_t> open_;        // of each domain
  std::vector<int32_t> stretch_of_;  // of each sequence
  std::vector<std::size_t> counts_;  // of sequences, of each stretch
  std::vector<std::size_t> part_of_;
};

// The parts of a plan whose ranks are domains; `ids`: what its sequences are in the problem;
// `order`: of them, longest first.
std::vector<DomainPlan::Part> parts_of(const Problem& problem, const Plan& plan,
                                       const std::vector<SequenceId>& ids,
                                       const std::vector<SequenceId>& order) {
  const int64_t num_domains = problem.num_ranks / problem.expert_ranks;
  std::vector<DomainPlan::Part> parts;
  Stretches stretches(index(num_domains), problem.lengths.size());
  for (int64_t m = 0; m < plan.num_micro_batches(); ++m) {
    const auto begin = plan.ranks.begin() + plan.rank_offsets[index(m)];
    const auto end = plan.ranks.begin() + plan.rank_offsets[index(m) + 1];
    const bool is_ring = end - begin > 1;
    DomainPlan::Part ring;
    for (auto i = plan.sequence_offsets[index(m)]; i < plan.sequence_offsets[index(m) + 1]; ++i) {
      const SequenceId id = ids[index(plan.sequences[index(i)])];
      if (is_ring) {
        ring.sequences.push_back(id);
      } else {
        stretches.add(*begin, id);
      }
    }
    if (is_ring && !ring.sequences.empty()) {
      ring.domains.assign(begin, end);
      for (const int32_t domain : ring.domains) stretches.end(domain, parts);
      parts.push_back(std::move(ring));
    }
    for (int32_t i = plan.local_offset(m); i < plan.local_offset(m + 1); ++i) {
      stretches.add(plan.locals.ranks[index(i)], ids[index(plan.locals.sequences[index(i)])]);
    }
  }
  for (int32_t domain = 0; domain < num_domains; ++domain) stretches.end(domain, parts);
  stretches.fill(order, ids, parts);
  return parts;
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
    Stretches stretches(1, problem.lengths.size());
    for (const SequenceId id : ids) stretches.add(0, id);
    stretches.end(0, result.parts);
    stretches.fill(longest_first(lengths), ids, result.parts);
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
  const Batch batch(domains);
  result.parts = parts_of(problem, first_draft(batch), ids, batch.order);
  return result;
}

}  // namespace hdp
