// Every strategy on random problems: the plans cover the batch and fit the ranks.
#include <cstdio>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "planner/base/memory.hpp"
#include "planner/base/slices.hpp"
#include "planner/planner.hpp"
#include "tests/checking.hpp"

namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr int num_problems = 300;
#else
constexpr int num_problems = 100;  // without the compiler's optimization each takes 20 ms
#endif

void check_that(bool holds, const char* text, const std::string& strategy, int seed) {
  if (holds) return;
  std::printf("stress_test.cpp, %s, problem %d: %s\n", strategy.c_str(), seed, text);
  ++hdp_tests::num_failed;
}

// The same numbers on every machine: a linear congruential generator, its high bits.
class Numbers {
 public:
  explicit Numbers(int seed) : state_(static_cast<uint64_t>(seed)) { between(0, 1); }

  int64_t between(int64_t least, int64_t greatest) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    const auto count = static_cast<uint64_t>(greatest - least + 1);
    return least + static_cast<int64_t>((state_ >> 33) % count);
  }

  // One of `num_cases` cases in which something is the case.
  bool one_in(int64_t num_cases) { return between(1, num_cases) == 1; }

 private:
  uint64_t state_;
};

// Seconds that never fall with the length; attention per token may.
hdp::AttentionTable random_table(Numbers& numbers) {
  std::vector<hdp::AttentionPoint> points;
  hdp::AttentionPoint last;
  for (int64_t left = numbers.between(1, 12); left > 0; --left) {
    last.length += numbers.between(1, 200);
    last.seconds += 0.25 * static_cast<double>(numbers.between(0, 100));
    points.push_back(last);
  }
  return hdp::AttentionTable(std::move(points));
}

hdp::CostModel random_cost_model(Numbers& numbers) {
  hdp::CostModel cost;
  cost.a = numbers.one_in(3) ? 0 : 1e-6 * static_cast<double>(numbers.between(1, 1000));
  const auto linear = static_cast<double>(numbers.between(1, 1000));
  cost.linear_s_per_token = numbers.one_in(4) ? 0 : 1e-3 * linear;
  cost.g = numbers.one_in(2) ? 0 : static_cast<double>(numbers.between(1, 10));
  cost.kv_bytes_per_token = static_cast<double>(numbers.between(0, 3));
  cost.inter_node_bytes_per_s = 1e-2 * static_cast<double>(numbers.between(1, 100000));
  cost.intra_node_bytes_per_s = 6 * cost.inter_node_bytes_per_s;
  cost.ranks_per_node = numbers.between(1, 9);
  cost.activation_bytes_per_token = static_cast<double>(numbers.between(0, 2));
  cost.host_bytes_per_s = static_cast<double>(numbers.between(1, 1000));
  cost.num_layers = numbers.between(1, 40);
  if (cost.a == 0 && numbers.one_in(2)) cost.attention = random_table(numbers);
  return cost;
}

hdp::Problem random_problem(int seed, bool offload) {
  Numbers numbers(seed);
  hdp::Problem problem;
  problem.num_ranks = numbers.between(1, 70);
  problem.slice_multiple = numbers.between(1, 4);
  problem.tokens_per_rank = numbers.between(2 * problem.slice_multiple, 300);
  problem.effort = numbers.one_in(4) ? 2 : 1;
  problem.offload = offload;
  problem.cost = random_cost_model(numbers);
  if (numbers.one_in(2)) {
    for (int64_t rank = 0; rank < problem.num_ranks; ++rank) {
      problem.speeds.push_back(numbers.one_in(3) ? 0.25 * static_cast<double>(numbers.between(1, 8))
                                                 : 1.0);
    }
  }
  const int64_t multiples = problem.tokens_per_rank / (2 * problem.slice_multiple);
  const int64_t longest = 2 * multiples * problem.slice_multiple * problem.num_ranks;
  const int64_t usual = numbers.one_in(2) ? longest : std::min(longest, problem.tokens_per_rank);
  problem.max_length = longest;
  std::vector<int64_t> lengths;
  for (int64_t left = numbers.between(1, 120); left > 0; --left) {
    lengths.push_back(numbers.between(1, numbers.one_in(20) ? longest : usual));
  }
  problem.lengths = std::move(lengths);
  return problem;
}

// Every sequence once, every rank at most once in a micro-batch, all of them ranks there are.
bool covers(const hdp::Problem& problem, const hdp::Plan& plan) {
  std::vector<int> held(problem.lengths.size());
  for (const int64_t id : plan.sequences) ++held.at(hdp::index(id));
  for (const int64_t id : plan.locals.sequences) ++held.at(hdp::index(id));
  for (const int times : held) {
    if (times != 1) return false;
  }
  for (std::size_t m = 0; m + 1 < plan.rank_offsets.size(); ++m) {
    std::vector<int> seats(hdp::index(problem.num_ranks));
    if (plan.rank_offsets[m] == plan.rank_offsets[m + 1]) return false;
    for (auto i = plan.rank_offsets[m]; i < plan.rank_offsets[m + 1]; ++i) {
      if (++seats.at(hdp::index(plan.ranks[hdp::index(i)])) > 1) {
        return false;
      }
    }
  }
  return true;
}

// On every member of every ring: its slices and its whole sequences, what is offloaded left out.
bool fits(const hdp::Problem& problem, const hdp::Plan& plan) {
  const auto tokens = [&](int64_t id, int64_t degree) {
    const int64_t length = problem.lengths[hdp::index(id)];
    return hdp::slice_tokens(length, degree, problem.slice_multiple);
  };
  for (std::size_t m = 0; m + 1 < plan.rank_offsets.size(); ++m) {
    const int64_t degree = plan.rank_offsets[m + 1] - plan.rank_offsets[m];
    const double share = hdp::resident_share(problem, plan.offload_ratio(static_cast<int64_t>(m)));
    for (auto i = plan.rank_offsets[m]; i < plan.rank_offsets[m + 1]; ++i) {
      int64_t held = 0;
      for (auto s = plan.sequence_offsets[m]; s < plan.sequence_offsets[m + 1]; ++s) {
        held += tokens(plan.sequences[hdp::index(s)], degree);
      }
      const auto last = plan.local_offset(static_cast<int64_t>(m) + 1);
      for (auto s = plan.local_offset(static_cast<int64_t>(m)); s < last; ++s) {
        const auto at = hdp::index(s);
        if (plan.locals.ranks[at] != plan.ranks[hdp::index(i)]) continue;
        held += tokens(plan.locals.sequences[at], 1);
      }
      const auto capacity = static_cast<double>(problem.tokens_per_rank) * (1 + 1e-12);
      if (static_cast<double>(held) * share > capacity) return false;
    }
  }
  return true;
}

void stress(const std::string& strategy, int seed, const hdp::Problem& problem) {
  const hdp::Answer answer = hdp::make_plan(problem, strategy);
  check_that(covers(problem, answer.plan), "does not cover the batch", strategy, seed);
  check_that(fits(problem, answer.plan), "does not fit", strategy, seed);
  check_that(answer.lower_bound_s <= answer.schedule.makespan_s * (1 + 1e-9),
             "is faster than the bound", strategy, seed);
}

void stress(const std::string& strategy, int seed, bool offload) {
  stress(strategy, seed, random_problem(seed, offload));
}

// On a random problem whose sequences are cut to what a power of two of the ranks holds.
void stress_dynamic_cp(int seed) {
  hdp::Problem problem = random_problem(seed, false);
  int64_t most = 1;
  while (2 * most <= problem.num_ranks) most *= 2;
  problem.max_length = problem.max_length / problem.num_ranks * most;
  std::vector<int64_t> lengths(problem.lengths.begin(), problem.lengths.end());
  for (int64_t& length : lengths) length = std::min(length, problem.max_length);
  problem.lengths = std::move(lengths);
  stress("dynamic-cp", seed, problem);
}

// The checks see a sequence that is missing, one that is twice there, and one that is too long.
TEST(test_the_checks) {
  hdp::Problem problem;
  problem.lengths = {10, 10};
  problem.num_ranks = 2;
  problem.tokens_per_rank = 10;
  hdp::Plan plan;
  plan.add({0}, {0});
  check_that(!covers(problem, plan), "a missing sequence is not seen", "checks", 0);
  plan.add({0, 1}, {1});
  check_that(covers(problem, plan) && fits(problem, plan), "a good plan is refused", "checks", 1);
  problem.lengths = {10, 21};
  check_that(!fits(problem, plan), "a slice that is too long is not seen", "checks", 2);
  plan.add({1, 1}, {1});
  check_that(!covers(problem, plan), "a sequence that is there twice is not seen", "checks", 3);
}

TEST(test_strategies_on_random_problems) {
  for (int seed = 0; seed < num_problems; ++seed) {
    for (const char* strategy : {"static", "naive", "bytescale"}) stress(strategy, seed, false);
    for (const char* strategy : {"naive", "bytescale"}) stress(strategy, seed, true);
    stress_dynamic_cp(seed);
    if (seed % 4 == 0) stress("dp-balance", seed, seed % 8 == 0);  // its search takes long
    if (seed % 2 == 0) {
      hdp::Problem shared = random_problem(seed, seed % 8 == 0);
      shared.expert_ranks = std::gcd(shared.num_ranks, int64_t{12});
      shared.cost.b_experts = shared.cost.linear_s_per_token / 2;
      stress("ep-balance", seed, shared);
    }
  }
}

}  // namespace
