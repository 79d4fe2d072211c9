#include "planner/schedule.hpp"

#include <algorithm>

#include "planner/cost_model.hpp"
#include "planner/slices.hpp"

namespace hdp {
namespace {

// What every member of a micro-batch shares, and the most that locals add to one member.
struct Load {
  double seconds = 0;
  int64_t tokens = 0;
};

struct RingLoad {
  Load load;
  double ring_tokens = 0;
};

std::vector<int32_t> ring_of(const Plan& plan, std::size_t m) {
  return {plan.ranks.begin() + plan.rank_offsets[m], plan.ranks.begin() + plan.rank_offsets[m + 1]};
}

RingLoad ring_load(const Problem& problem, const Plan& plan, std::size_t m,
                   const std::vector<int32_t>& ring) {
  const auto degree = static_cast<int64_t>(ring.size());
  RingLoad result;
  double attention = 0;
  double compute = 0;
  double tokens = 0;
  for (auto i = plan.sequence_offsets[m]; i < plan.sequence_offsets[m + 1]; ++i) {
    const int64_t id = plan.sequences[static_cast<std::size_t>(i)];
    const int64_t length = problem.lengths[static_cast<std::size_t>(id)];
    attention += attention_s(problem.cost, length);
    compute += compute_s(problem.cost, length);
    tokens += static_cast<double>(length);
    result.load.tokens += slice_tokens(length, degree, problem.slice_multiple);
  }
  const bool one_node = in_one_node(ring, problem.cost.ranks_per_node);
  const auto d = static_cast<double>(degree);
  const double transfer = transfer_s(problem.cost, degree, tokens, one_node);
  result.load.seconds = compute / d + std::max(0.0, transfer - attention / d) + problem.cost.g;
  result.ring_tokens = (d - 1) * tokens;
  return result;
}

Load greatest_local_load(const Problem& problem, const Plan& plan, std::size_t m) {
  Load greatest;
  Load member;
  for (auto i = plan.local_offsets[m]; i < plan.local_offsets[m + 1]; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (i > plan.local_offsets[m] && plan.local_ranks[at] != plan.local_ranks[at - 1]) member = {};
    const int64_t length = problem.lengths[static_cast<std::size_t>(plan.local_sequences[at])];
    member.seconds += compute_s(problem.cost, length);
    member.tokens += slice_tokens(length, 1, problem.slice_multiple);
    greatest.seconds = std::max(greatest.seconds, member.seconds);
    greatest.tokens = std::max(greatest.tokens, member.tokens);
  }
  return greatest;
}

}  // namespace

bool in_one_node(const std::vector<int32_t>& ranks, int64_t ranks_per_node) {
  const int64_t node = ranks.front() / ranks_per_node;
  return std::all_of(ranks.begin(), ranks.end(),
                     [&](int32_t rank) { return rank / ranks_per_node == node; });
}

Schedule simulate(const Problem& problem, const Plan& plan) {
  Schedule schedule;
  std::vector<double> clocks(static_cast<std::size_t>(problem.num_ranks), 0.0);
  for (std::size_t m = 0; m + 1 < plan.rank_offsets.size(); ++m) {
    const std::vector<int32_t> ring = ring_of(plan, m);
    const RingLoad shared = ring_load(problem, plan, m, ring);
    const Load local = greatest_local_load(problem, plan, m);
    double start = 0;
    for (const int32_t rank : ring) start = std::max(start, clocks[static_cast<std::size_t>(rank)]);
    const double end = start + shared.load.seconds + local.seconds;
    for (const int32_t rank : ring) clocks[static_cast<std::size_t>(rank)] = end;
    schedule.makespan_s = std::max(schedule.makespan_s, end);
    schedule.ring_tokens += shared.ring_tokens;
    schedule.max_tokens_on_a_rank =
        std::max(schedule.max_tokens_on_a_rank, shared.load.tokens + local.tokens);
  }
  return schedule;
}

}  // namespace hdp
