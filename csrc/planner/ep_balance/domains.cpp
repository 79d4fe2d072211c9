#include "planner/ep_balance/domains.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "planner/base/slices.hpp"
#include "planner/base/sorting.hpp"
#include "planner/dp_balance/dp_balance.hpp"
#include "planner/ep_balance/rank_groups.hpp"
#include "planner/rings/batch.hpp"

namespace hdp {
namespace {

// A domain computes as its ranks together, but each of them receives all that a ring sends.
CostModel cost_of_domain(const CostModel& rank, int64_t size) {
  const auto ranks = static_cast<double>(size);
  CostModel cost = rank;
  cost.a /= ranks;
  cost.linear_s_per_token /= ranks;
  cost.attention_b /= ranks;
  if (!rank.attention.empty()) {
    std::vector<AttentionPoint> points = rank.attention.points();
    for (AttentionPoint& point : points) point.seconds /= ranks;
    cost.attention = AttentionTable(std::move(points));
  }
  cost.g = 0;
  cost.b_experts = 0;
  cost.block_all_layers_s *= ranks;
  cost.intra_node_hop_all_layers_s *= ranks;
  cost.inter_node_hop_all_layers_s *= ranks;
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

// What domains run between rings, put together; sequences are those of the plan.
class Stretches {
 public:
  Stretches(std::size_t num_domains, std::size_t num_sequences)
      : open_(num_domains, kNone), stretch_of_(num_sequences, kNone) {}

  // The domain runs this sequence next.
  void add(int32_t domain, SequenceId sequence) {
    int32_t& stretch = open_[index(domain)];
    if (stretch == kNone) {
      stretch = static_cast<int32_t>(stretches_.size());
      stretches_.push_back({});
    }
    ++stretches_[index(stretch)].num_sequences;
    stretch_of_[index(sequence)] = stretch;
  }

  // What the domain runs next comes behind the parts made so far, and what it ran before them.
  void end(int32_t domain, std::vector<DomainPlan::Part>& parts) {
    const int32_t number = std::exchange(open_[index(domain)], kNone);
    if (number == kNone) return;
    Stretch& stretch = stretches_[index(number)];
    stretch.part = parts.size();
    parts.push_back({{domain}, {}});
    parts.back().sequences.reserve(stretch.num_sequences);
  }

  // The parts get their sequences in this order; `ids`: what these are in the problem.
  void fill(const std::vector<SequenceId>& order, const std::vector<SequenceId>& ids,
            std::vector<DomainPlan::Part>& parts) const {
    for (const SequenceId sequence : order) {
      const int32_t number = stretch_of_[index(sequence)];
      if (number == kNone) continue;
      parts[stretches_[index(number)].part].sequences.push_back(ids[index(sequence)]);
    }
  }

 private:
  struct Stretch {
    std::size_t num_sequences = 0;
    std::size_t part = 0;
  };
  static constexpr int32_t kNone = -1;

  std::vector<int32_t> open_;        // of each domain
  std::vector<int32_t> stretch_of_;  // of each sequence
  std::vector<Stretch> stretches_;
};

// The parts of the first draft for domains in the place of ranks; `ids`: what its sequences are in
// the problem.
std::vector<DomainPlan::Part> parts_of(const Problem& domains, const std::vector<SequenceId>& ids) {
  const Batch batch(domains);
  const Plan plan = first_draft(batch);
  std::vector<DomainPlan::Part> parts;
  Stretches stretches(index(domains.num_ranks), ids.size());
  for (int64_t m = 0; m < plan.num_micro_batches(); ++m) {
    const Span ring = plan.ring(m);
    const Span sharded = plan.sharded(m);
    if (ring.size() == 1) {
      for (const SequenceId sequence : sharded) stretches.add(*ring.first, sequence);
    } else if (sharded.size() > 0) {
      for (const int32_t domain : ring) stretches.end(domain, parts);
      parts.push_back({{ring.first, ring.last}, {}});
      for (const SequenceId sequence : sharded) {
        parts.back().sequences.push_back(ids[index(sequence)]);
      }
    }
    for (int32_t i = plan.local_offset(m); i < plan.local_offset(m + 1); ++i) {
      stretches.add(plan.locals.ranks[index(i)], plan.locals.sequences[index(i)]);
    }
  }
  for (int32_t domain = 0; domain < domains.num_ranks; ++domain) stretches.end(domain, parts);
  stretches.fill(batch.order, ids, parts);
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
    DomainPlan::Part all{{0}, {}};
    for (const SequenceId place : longest_first(lengths)) {
      all.sequences.push_back(ids[index(place)]);
    }
    result.parts.push_back(std::move(all));
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
  result.parts = parts_of(domains, ids);
  return result;
}

}  // namespace hdp
