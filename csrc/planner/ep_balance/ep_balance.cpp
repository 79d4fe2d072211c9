#include "planner/ep_balance/ep_balance.hpp"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "planner/base/cost_model.hpp"
#include "planner/base/memory.hpp"
#include "planner/base/slices.hpp"
#include "planner/base/sorting.hpp"
#include "planner/base/stream.hpp"
#include "planner/dp_balance/dp_balance.hpp"
#include "planner/ep_balance/rows.hpp"
#include "planner/pp_balance/pp_balance.hpp"
#include "planner/rings/batch.hpp"
#include "planner/schedule/schedule.hpp"

namespace hdp {
namespace {

// Of what experts compute nothing depends on who owns a token. Where nothing else is linear, some
// time a token keeps rows from filler up with what takes none.
constexpr double kLeastShare = 1e-6;

Problem dense_of(const Problem& problem) {
  Problem dense = without_experts(problem);
  double& linear = dense.cost.linear_s_per_token;
  linear = std::max({linear, kLeastShare * problem.cost.linear_s_per_token, 1e-15});
  return dense;
}

// What domains run, and which of it comes behind what.
struct DomainPlan {
  // A ring over several domains, or else what one of them runs up to its next such ring: whole
  // sequences, longest first.
  struct Part {
    std::vector<int32_t> domains;
    std::vector<SequenceId> sequences;
    bool is_alone = false;  // on all ranks of the domains, as a stream or offloaded
  };
  std::vector<Part> parts;           // in launch order
  std::vector<SequenceId> too_long;  // that no ring of whole domains holds
};

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
  const Batch batch(domains, domains.streams);
  const Plan plan = first_draft(batch);
  std::vector<DomainPlan::Part> parts;
  Stretches stretches(index(domains.num_ranks), ids.size());
  for (int64_t m = 0; m < plan.num_micro_batches(); ++m) {
    const Span ring = plan.ring(m);
    const Span sharded = plan.sharded(m);
    const bool is_alone = plan.parts_of_stream(m) > 0 || plan.offload_ratio(m) > 0;
    if (ring.size() == 1 && !is_alone) {
      for (const SequenceId sequence : sharded) stretches.add(*ring.first, sequence);
    } else if (sharded.size() > 0) {
      for (const int32_t domain : ring) stretches.end(domain, parts);
      parts.push_back({{ring.first, ring.last}, {}, is_alone});
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

// The problem whose ranks are the domains, as dp-balance drafts it: capacity and speed of all of
// their ranks. g is not counted: domains fill their positions afterwards. So other drafts, which
// differ in what micro-batches cost, and other strategies' plans are not worth their time. With
// `few` long sequences begin as streams on few domains; else those alone stream that no ring holds.
DomainPlan plan_domains(const Problem& problem, bool few) {
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
  domains.streams = few;
  domains.offload = few && problem.offload;
  domains.host_memory_bytes = static_cast<double>(size) * problem.host_memory_bytes;
  result.parts = parts_of(domains, ids);
  return result;
}

// Deals what domains run into positions.
class Builder {
 public:
  explicit Builder(const Problem& problem)
      : problem_(problem),
        dense_(dense_of(problem)),
        counts_(index(problem.num_ranks / problem.expert_ranks), 0) {}

  Plan run(bool few = false) {
    const DomainPlan domains = plan_domains(problem_, few);
    for (const SequenceId id : domains.too_long) add_too_long(id);
    for (const DomainPlan::Part& part : domains.parts) {
      if (part.is_alone) {
        add_alone(part.sequences.front(), ranks_of(part.domains));
      } else if (part.domains.size() == 1) {
        deal(part.domains[0], part.sequences);
      } else {
        add_ring(ranks_of(part.domains), part.sequences);
      }
    }
    return made_.sorted();
  }

 private:
  std::vector<int32_t> ranks_of(const std::vector<int32_t>& domains) const {
    const auto size = static_cast<int32_t>(problem_.expert_ranks);
    std::vector<int32_t> ranks;
    for (const int32_t domain : domains) {
      for (int32_t rank = 0; rank < size; ++rank) ranks.push_back(domain * size + rank);
    }
    return ranks;
  }

  // A ring at the first position that is free in all of its domains.
  void add_ring(const std::vector<int32_t>& ranks, const std::vector<SequenceId>& sequences) {
    made_.add(next_position(ranks), ranks, sequences, 0);
  }

  void add_alone(SequenceId id, const std::vector<int32_t>& ranks) {
    if (fits(id, static_cast<int64_t>(ranks.size()))) {
      made_.add_alone(next_position(ranks), problem_, ranks, id);
    } else {
      add_too_long(id);
    }
  }

  bool fits(SequenceId id, int64_t degree) const {
    const int64_t length = problem_.lengths[index(id)];
    return offload_ratio(problem_, length, degree) || may_stream(problem_, length, degree);
  }

  int32_t next_position(const std::vector<int32_t>& ranks) {
    int32_t position = 0;
    for (const int32_t rank : ranks) position = std::max(position, count_of(rank));
    for (const int32_t rank : ranks) count_of(rank) = position + 1;
    return position;
  }

  int32_t& count_of(int32_t rank) { return counts_[index(rank / problem_.expert_ranks)]; }

  // On all ranks, or on the least number that memory allows: activations leave the ranks, or the
  // sequence streams.
  void add_too_long(SequenceId id) {
    const int64_t length = problem_.lengths[index(id)];
    int64_t degree = problem_.num_ranks;
    if (!fits(id, degree)) degree = least_degree(problem_, length);
    if (!fits(id, degree)) degree = least_stream_degree(problem_, length);
    std::vector<int32_t> ranks(index(degree));
    std::iota(ranks.begin(), ranks.end(), 0);
    add_alone(id, ranks);
  }

  // Whole sequences of a domain, longest first, into its next positions.
  void deal(int32_t domain, const std::vector<SequenceId>& sequences) {
    items_.clear();
    items_.reserve(sequences.size());
    for (const SequenceId id : sequences) {
      const int64_t length = problem_.lengths[index(id)];
      items_.push_back({id, length, slice_tokens(length, 1, problem_.slice_multiple),
                        compute_s(dense_.cost, length)});
    }
    rows_.start(domain * static_cast<int32_t>(problem_.expert_ranks));
    while (const Row* row = rows_.next()) {
      made_.add(counts_[index(domain)]++, *row, items_);
    }
  }

  const Problem& problem_;
  const Problem dense_;
  std::vector<int32_t> counts_;  // positions of each domain
  Items items_;
  Rows rows_{dense_, items_};
  MicroBatches made_;
};

Problem without_streams(const Problem& problem) {
  Problem whole = problem;
  whole.streams = false;
  return whole;
}

Plan of_pipelines(const Problem& problem) {
  if (problem.expert_ranks == 1) return pp_balance(problem);
  Plan best;
  double least_s = kInfinity;
  const auto offer = [&](Plan plan) {
    const double makespan_s = run_together(problem, plan).makespan_s(problem);
    if (makespan_s >= least_s) return;
    least_s = makespan_s;
    best = std::move(plan);
  };
  std::set<int64_t> numbers{1};
  if (may_run_in_parts(problem)) numbers.insert(problem.sequence_parts);
  // plans in parts, or with streams, are made as if no rank waited for its domain: others may be
  // faster
  for (const bool streams : {false, true}) {
    if (streams ? !problem.streams : !rings_hold_all(without_streams(problem))) continue;
    for (const int64_t parts : numbers) {
      Problem known = problem;
      known.sequence_parts = parts;
      known.streams = streams;
      Plan plan = pp_balance(known);
      plan.positions = aligned_positions(problem, plan);
      Plan chosen = plan;
      chosen.num_parts.clear();
      choose_parts(problem, chosen);
      offer(std::move(chosen));
      if (plan.num_parts.empty()) continue;
      equalize_parts(problem, plan);
      offer(std::move(plan));
    }
  }
  return best;
}

}  // namespace

Plan ep_balance(const Problem& problem) {
  if (problem.pipeline_stages > 1) return of_pipelines(problem);
  if (problem.expert_ranks == 1) return dp_balance(problem).plan;
  Plan plan = Builder(problem).run();
  if (!problem.streams) return plan;
  Plan of_few = Builder(problem).run(true);
  const auto makespan_s = [&](const Plan& made) {
    return simulate_lockstep(problem, made).makespan_s;
  };
  return makespan_s(of_few) < makespan_s(plan) ? of_few : plan;
}

}  // namespace hdp
