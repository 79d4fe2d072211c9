#include "planner/ep_balance/ep_balance.hpp"

#include <algorithm>
#include <numeric>
#include <vector>

#include "planner/base/cost_model.hpp"
#include "planner/base/memory.hpp"
#include "planner/base/slices.hpp"
#include "planner/dp_balance/dp_balance.hpp"
#include "planner/ep_balance/domains.hpp"
#include "planner/ep_balance/micro_batches.hpp"
#include "planner/ep_balance/rows.hpp"
#include "planner/pp_balance/pp_balance.hpp"
#include "planner/schedule/lockstep.hpp"

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

// Deals what domains run into positions.
class Builder {
 public:
  explicit Builder(const Problem& problem)
      : problem_(problem),
        dense_(dense_of(problem)),
        counts_(index(problem.num_ranks / problem.expert_ranks), 0) {}

  Plan run() {
    const DomainPlan domains = plan_domains(problem_);
    for (const SequenceId id : domains.too_long) add_too_long(id);
    for (const DomainPlan::Part& part : domains.parts) {
      if (part.domains.size() == 1) {
        deal(part.domains[0], part.sequences);
      } else {
        add_ring(ranks_of(part.domains), part.sequences, 0);
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
  void add_ring(const std::vector<int32_t>& ranks, const std::vector<SequenceId>& sequences,
                double ratio) {
    int32_t position = 0;
    for (const int32_t rank : ranks) position = std::max(position, count_of(rank));
    for (const int32_t rank : ranks) count_of(rank) = position + 1;
    made_.add(position, ranks, sequences, ratio);
  }

  int32_t& count_of(int32_t rank) { return counts_[index(rank / problem_.expert_ranks)]; }

  // On all ranks, or on the least number that memory allows, as activations leave the ranks.
  void add_too_long(SequenceId id) {
    const int64_t length = problem_.lengths[index(id)];
    int64_t degree = problem_.num_ranks;
    if (!offload_ratio(problem_, length, degree)) degree = least_degree(problem_, length);
    std::vector<int32_t> ranks(index(degree));
    std::iota(ranks.begin(), ranks.end(), 0);
    add_ring(ranks, {id}, *offload_ratio(problem_, length, degree));
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

Plan of_pipelines(const Problem& problem) {
  Plan plan = pp_balance(problem);
  if (problem.expert_ranks > 1) plan.positions = aligned_positions(problem, plan);
  return plan;
}

}  // namespace

Plan ep_balance(const Problem& problem) {
  if (problem.pipeline_stages > 1) return of_pipelines(problem);
  if (problem.expert_ranks == 1) return dp_balance(problem).plan;
  return Builder(problem).run();
}

}  // namespace hdp
