#include "planner/ep_balance/ep_balance.hpp"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "planner/base/cost_model.hpp"
#include "planner/base/memory.hpp"
#include "planner/base/sorting.hpp"
#include "planner/dp_balance/dp_balance.hpp"
#include "planner/ep_balance/domains.hpp"
#include "planner/ep_balance/rows.hpp"
#include "planner/pp_balance/pp_balance.hpp"
#include "planner/schedule/lockstep.hpp"

namespace hdp {
namespace {

std::size_t index(int64_t value) { return static_cast<std::size_t>(value); }

// Of what experts compute nothing depends on who owns a token. Where nothing else is linear, some
// time a token keeps rows from filling up with what takes none.
constexpr double kLeastShare = 1e-6;

Problem dense_of(const Problem& problem) {
  Problem dense = without_experts(problem);
  dense.cost.b = std::max({dense.cost.b, kLeastShare * problem.cost.b, 1e-15});
  return dense;
}

// Micro-batches in the order of their positions.
class Builder {
 public:
  explicit Builder(const Problem& problem)
      : problem_(problem),
        dense_(dense_of(problem)),
        counts_(index(problem.num_ranks / problem.expert_ranks), 0),
        pools_(counts_.size()) {}

  Plan run() {
    const DomainPlan domains = plan_domains(problem_);
    for (const SequenceId id : domains.too_long) add_too_long(id);
    for (const DomainPlan::Part& part : domains.parts) {
      if (part.domains.size() == 1) {
        Places& pool = pools_[index(part.domains[0])];
        pool.insert(pool.end(), part.sequences.begin(), part.sequences.end());
      } else {
        for (const int32_t domain : part.domains) empty(domain);
        add_ring(ranks_of(part.domains), part.sequences, 0);
      }
    }
    for (std::size_t domain = 0; domain < pools_.size(); ++domain) {
      empty(static_cast<int32_t>(domain));
    }
    return sorted();
  }

 private:
  struct MicroBatch {
    int32_t position = 0;
    std::vector<int32_t> ranks;
    std::vector<SequenceId> sequences;
    Locals locals;
    double offload_ratio = 0;
  };

  std::vector<int32_t> ranks_of(const std::vector<int32_t>& domains) const {
    const auto size = static_cast<int32_t>(problem_.expert_ranks);
    std::vector<int32_t> ranks;
    for (const int32_t domain : domains) {
      for (int32_t rank = 0; rank < size; ++rank) ranks.push_back(domain * size + rank);
    }
    return ranks;
  }

  // A ring at the first position that is free in all of its domains.
  void add_ring(std::vector<int32_t> ranks, std::vector<SequenceId> sequences, double ratio) {
    int32_t position = 0;
    for (const int32_t rank : ranks) position = std::max(position, count_of(rank));
    for (const int32_t rank : ranks) count_of(rank) = position + 1;
    made_.push_back({position, std::move(ranks), std::move(sequences), {}, ratio});
  }

  int32_t& count_of(int32_t rank) { return counts_[index(rank / problem_.expert_ranks)]; }

  // On all ranks, or on the least number that memory allows, as activations leave the ranks.
  void add_too_long(SequenceId id) {
    const int64_t length = problem_.lengths[index(id)];
    int64_t degree = problem_.num_ranks;
    if (!offload_ratio(problem_, length, degree)) degree = least_degree(problem_, length);
    std::vector<int32_t> ranks(index(degree));
    std::iota(ranks.begin(), ranks.end(), 0);
    add_ring(std::move(ranks), {id}, *offload_ratio(problem_, length, degree));
  }

  // What a domain has whole is dealt into its next positions.
  void empty(int32_t domain) {
    Places pool = std::exchange(pools_[index(domain)], {});
    if (pool.empty()) return;
    Items items;
    items.reserve(pool.size());
    for (const std::size_t id : pool) {
      const int64_t length = problem_.lengths[id];
      items.push_back({static_cast<SequenceId>(id), length, compute_s(dense_.cost, length)});
    }
    std::sort(items.begin(), items.end(), [](const Item& left, const Item& right) {
      return std::make_pair(-left.length, left.id) < std::make_pair(-right.length, right.id);
    });
    const auto first = domain * static_cast<int32_t>(problem_.expert_ranks);
    for (const Row& row : Rows(dense_, first, problem_.expert_ranks).deal(items)) {
      const int32_t position = counts_[index(domain)]++;
      for (const Cell& cell : row) add_cell(cell, items, position);
    }
  }

  void add_cell(const Cell& cell, const Items& items, int32_t position) {
    std::vector<int32_t> ranks(index(cell.num_ranks));
    std::iota(ranks.begin(), ranks.end(), cell.first);
    if (cell.sharded.empty()) {
      auto next = cell.locals.begin();
      for (const int32_t rank : ranks) {
        std::vector<SequenceId> sequences;
        for (; next != cell.locals.end() && next->first == rank; ++next) {
          sequences.push_back(items[next->second].id);
        }
        if (sequences.empty()) continue;
        made_.push_back({position, {rank}, std::move(sequences), {}, 0});
      }
      return;
    }
    MicroBatch ring{position, std::move(ranks), {}, {}, 0};
    for (const std::size_t place : cell.sharded) ring.sequences.push_back(items[place].id);
    for (const auto& [rank, place] : cell.locals) {
      ring.locals.ranks.push_back(rank);
      ring.locals.sequences.push_back(items[place].id);
    }
    made_.push_back(std::move(ring));
  }

  Plan sorted() {
    std::stable_sort(made_.begin(), made_.end(),
                     [](const MicroBatch& left, const MicroBatch& right) {
                       return left.position < right.position;
                     });
    Plan plan;
    for (const MicroBatch& one : made_) {
      plan.add(one.ranks, one.sequences, one.offload_ratio);
      plan.locals.ranks.insert(plan.locals.ranks.end(), one.locals.ranks.begin(),
                               one.locals.ranks.end());
      plan.locals.sequences.insert(plan.locals.sequences.end(), one.locals.sequences.begin(),
                                   one.locals.sequences.end());
      plan.end_locals(plan.locals.sequences.size());
      plan.positions.push_back(one.position);
    }
    return plan;
  }

  const Problem& problem_;
  const Problem dense_;
  std::vector<int32_t> counts_;  // positions of each domain
  std::vector<Places> pools_;    // sequences of each domain that wait for positions
  std::vector<MicroBatch> made_;
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
