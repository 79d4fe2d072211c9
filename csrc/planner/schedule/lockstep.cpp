#include <algorithm>
#include <numeric>

#include "planner/base/cost_model.hpp"
#include "planner/base/stream.hpp"
#include "planner/schedule/schedule.hpp"

namespace hdp {
namespace {

// Positions of every domain, row by row.
class Grid {
 public:
  Grid(const Problem& problem, const Plan& plan, const std::vector<int32_t>& positions)
      : problem_(problem),
        plan_(plan),
        positions_(positions),
        num_domains_(problem.num_ranks / problem.expert_ranks) {
    for (const int32_t position : positions) num_ = std::max<int64_t>(num_, position + 1);
    num_ = std::max<int64_t>(num_, 1);
    dense_s_.assign(index(num_ * num_domains_), 0);
    tokens_.assign(dense_s_.size(), 0);
    runs_.assign(index(num_ * problem.num_ranks), false);
    counts_.assign(index(num_domains_), 1);
    parents_.resize(dense_s_.size());
    std::iota(parents_.begin(), parents_.end(), std::size_t{0});
    for (int64_t m = 0; m < plan.num_micro_batches(); ++m) lay_out(m);
    if (!plan.stream_parts.empty()) mark_streams();
  }

  Schedule run() {
    Schedule schedule = load();
    schedule.makespan_s = all_together().makespan_s(problem_);
    schedule.num_positions = num_;
    double places = 0;
    for (const int64_t count : counts_) {
      places += static_cast<double>(count * problem_.expert_ranks);
    }
    schedule.padding_share = 1 - static_cast<double>(plan_.ranks.size()) / places;
    return schedule;
  }

  // What the micro-batches are; makespan and positions are left out. Comes before all_together().
  Schedule load() {
    return sum_of_loads(without_experts(problem_), twice_.empty() ? plan_ : beside_streams(),
                        [&](int64_t m, double seconds) { add(m, seconds); });
  }

  // Domains in the place of ranks: what a ring ties at a position is one micro-batch of theirs.
  Together all_together() {
    Together together;
    together.num_ranks = num_domains_;
    std::vector<std::vector<int32_t>> tied(index(num_domains_));
    std::vector<std::size_t> group_of(dense_s_.size());  // by cell
    for (int64_t position = 0; position < num_; ++position) {
      const std::size_t begin = index(position * num_domains_);
      for (int64_t domain = 0; domain < num_domains_; ++domain) {
        if (position >= counts_[index(domain)]) continue;
        tied[root(begin + index(domain)) - begin].push_back(static_cast<int32_t>(domain));
      }
      for (std::vector<int32_t>& group : tied) {
        if (group.empty()) continue;
        double longest_s = 0;
        for (const int32_t domain : group) {
          longest_s = std::max(longest_s, seconds(position, domain));
          group_of[begin + index(domain)] = together.seconds.size();
        }
        together.ranks.insert(together.ranks.end(), group.begin(), group.end());
        together.offsets.push_back(static_cast<int32_t>(together.ranks.size()));
        together.seconds.push_back(longest_s);
        group.clear();
      }
    }
    std::vector<int32_t>& num_parts = together.passing.num_parts;
    num_parts.assign(together.seconds.size(), 1);
    if (!twice_.empty()) {
      together.passing.twice.resize(together.seconds.size(), false);
      together.passing.growth.resize(together.seconds.size(), 0);
    }
    for (int64_t m = 0; m < plan_.num_micro_batches(); ++m) {
      const std::size_t group = group_of[cell(m, *plan_.ring(m).first)];
      together.of_micro_batch.push_back(group);
      int32_t& parts = num_parts[group];
      parts = std::max(parts, static_cast<int32_t>(plan_.parts(m)));
      if (plan_.parts_of_stream(m) == 0) continue;
      const int64_t length = problem_.lengths[index(*plan_.sharded(m).begin())];
      double& growth = together.passing.growth[group];
      growth = std::max(growth, growth_of_stream(problem_, length));
      together.passing.twice[group] = true;
    }
    return together;
  }

 private:
  std::size_t cell(int64_t m, int32_t rank) const {
    return index(positions_[index(m)] * num_domains_ + rank / problem_.expert_ranks);
  }

  // Who runs what where, and which domains a ring ties.
  void lay_out(int64_t m) {
    const Span ring = plan_.ring(m);
    const std::size_t begin = cell(m, *ring.first);
    for (const int32_t rank : ring) {
      const std::size_t here = cell(m, rank);
      runs_[index(positions_[index(m)] * problem_.num_ranks + rank)] = true;
      int64_t& count = counts_[index(rank / problem_.expert_ranks)];
      count = std::max<int64_t>(count, positions_[index(m)] + 1);
      if (here != begin) join(here, begin);
    }
  }

  // All that is tied to a stream is computed twice, as it is.
  void mark_streams() {
    std::vector<bool> is_root(parents_.size(), false);
    for (int64_t m = 0; m < plan_.num_micro_batches(); ++m) {
      if (plan_.parts_of_stream(m) > 0) is_root[root(cell(m, *plan_.ring(m).first))] = true;
    }
    twice_.resize(parents_.size(), false);
    for (std::size_t here = 0; here < twice_.size(); ++here) twice_[here] = is_root[root(here)];
  }

  // The plan, in which what runs beside streams is recomputed.
  Plan beside_streams() const {
    Plan plan = plan_;
    plan.recomputed.assign(index(plan.num_micro_batches()), false);
    for (int64_t m = 0; m < plan.num_micro_batches(); ++m) {
      plan.recomputed[index(m)] =
          plan.parts_of_stream(m) == 0 && twice_[cell(m, *plan.ring(m).first)];
    }
    return plan;
  }

  void add(int64_t m, double seconds) {
    double tokens = 0;
    for (const SequenceId id : plan_.sharded(m)) {
      tokens += static_cast<double>(problem_.lengths[index(id)]);
    }
    const Span ring = plan_.ring(m);
    for (const int32_t rank : ring) {
      const std::size_t here = cell(m, rank);
      dense_s_[here] = std::max(dense_s_[here], seconds);
      tokens_[here] += tokens / static_cast<double>(ring.size());
    }
    for (int32_t i = plan_.local_offset(m); i < plan_.local_offset(m + 1); ++i) {
      const SequenceId id = plan_.locals.sequences[index(i)];
      tokens_[cell(m, plan_.locals.ranks[index(i)])] +=
          static_cast<double>(problem_.lengths[index(id)]);
    }
  }

  std::size_t root(std::size_t cell) {
    while (parents_[cell] != cell) cell = parents_[cell] = parents_[parents_[cell]];
    return cell;
  }

  void join(std::size_t left, std::size_t right) {
    left = root(left);
    right = root(right);
    parents_[std::max(left, right)] = std::min(left, right);
  }

  // Seconds of a domain at a position.
  double seconds(int64_t position, int64_t domain) const {
    if (position >= counts_[index(domain)]) return 0;
    const std::size_t here = index(position * num_domains_ + domain);
    const auto first = static_cast<int32_t>(domain * problem_.expert_ranks);
    double slowest = problem_.speed(first);
    for (int32_t rank = first; rank < first + problem_.expert_ranks; ++rank) {
      slowest = std::min(slowest, problem_.speed(rank));
    }
    const double computed = twice_.empty() || !twice_[here] ? 1 : kComputedTwice;
    return std::max(dense_s_[here], computed * padding_s(position, first)) +
           computed * problem_.cost.b_experts * tokens_[here] /
               static_cast<double>(problem_.expert_ranks) / slowest;
  }

  // Of the slowest rank that runs padding, of the domain that begins with this rank.
  double padding_s(int64_t position, int32_t first) const {
    double longest_s = 0;
    for (int32_t rank = first; rank < first + problem_.expert_ranks; ++rank) {
      if (runs_[index(position * problem_.num_ranks + rank)]) continue;
      longest_s = std::max(longest_s, fixed_s(problem_.cost, 1) / problem_.speed(rank));
    }
    return longest_s;
  }

  const Problem& problem_;
  const Plan& plan_;
  const std::vector<int32_t>& positions_;
  int64_t num_domains_;
  int64_t num_ = 0;  // positions
  std::vector<double> dense_s_;
  std::vector<double> tokens_;
  std::vector<bool> runs_;       // whether a rank has a micro-batch at a position
  std::vector<int64_t> counts_;  // positions of each domain
  std::vector<std::size_t> parents_;
  std::vector<bool> twice_;  // cells tied to a stream; empty: there is none
};

}  // namespace

std::vector<int32_t> aligned_positions(const Problem& problem, const Plan& plan) {
  if (!plan.positions.empty()) return plan.positions;
  std::vector<int32_t> counts(index(problem.num_ranks), 0);
  std::vector<int32_t> positions;
  positions.reserve(index(plan.num_micro_batches()));
  for (int64_t m = 0; m < plan.num_micro_batches(); ++m) {
    int32_t position = 0;
    for (const int32_t rank : plan.ring(m)) position = std::max(position, counts[index(rank)]);
    for (const int32_t rank : plan.ring(m)) counts[index(rank)] = position + 1;
    positions.push_back(position);
  }
  return positions;
}

Schedule simulate_lockstep(const Problem& problem, const Plan& plan) {
  const std::vector<int32_t> positions = aligned_positions(problem, plan);
  return Grid(problem, plan, positions).run();
}

Together run_together(const Problem& problem, const Plan& plan) {
  if (problem.expert_ranks > 1) {
    const std::vector<int32_t> positions = aligned_positions(problem, plan);
    Grid grid(problem, plan, positions);
    grid.load();
    return grid.all_together();
  }
  Together together{
      problem.num_ranks, plan.rank_offsets, plan.ranks, {}, passing_of(problem, plan), {}};
  sum_of_loads(problem, plan, [&](int64_t m, double seconds) {
    together.seconds.push_back(seconds);
    together.of_micro_batch.push_back(index(m));
  });
  return together;
}

double Together::makespan_s(const Problem& problem) const {
  const std::vector<double> ends =
      pipeline_ends(problem, offsets, ranks, seconds, num_ranks, passing);
  return *std::max_element(ends.begin(), ends.end());
}

Problem without_experts(const Problem& problem) {
  Problem dense = problem;
  dense.cost.linear_s_per_token =
      std::max(0.0, problem.cost.linear_s_per_token - problem.cost.b_experts);
  dense.cost.b_experts = 0;
  return dense;
}

}  // namespace hdp
