// Unit tests of what pipelines need.
#include "planner/schedule/pipeline.hpp"

#include <cmath>
#include <numeric>
#include <set>
#include <stdexcept>

#include "planner/base/sorting.hpp"
#include "planner/baselines/baselines.hpp"
#include "planner/pp_balance/fill.hpp"
#include "planner/pp_balance/pp_balance.hpp"
#include "planner/pp_balance/rounds.hpp"
#include "planner/pp_balance/rows.hpp"
#include "planner/pp_balance/seats.hpp"
#include "planner/pp_balance/shares.hpp"
#include "planner/schedule/schedule.hpp"
#include "tests/checking.hpp"

namespace {

bool near(double left, double right) { return std::abs(left - right) < 1e-9 * (1 + right); }

// A token takes a second.
hdp::Problem problem(std::vector<int64_t> lengths, int64_t num_ranks, int64_t stages,
                     int64_t capacity) {
  hdp::Problem result;
  result.lengths = std::move(lengths);
  result.num_ranks = num_ranks;
  result.tokens_per_rank = capacity;
  result.pipeline_stages = stages;
  for (const int64_t length : result.lengths) {
    result.max_length = std::max(result.max_length, length);
  }
  result.cost.b = 1;
  return result;
}

void test_schedule_of_one_rank() {
  hdp::Plan plan;
  for (hdp::SequenceId id = 0; id < 5; ++id) plan.add({0}, {id});
  CHECK(near(hdp::simulate_pipeline(problem({24, 24, 24, 24, 24}, 1, 4, 24), plan).makespan_s,
             5 * 6 + 18));
  // a heavy one among light ones: see the Python test of the same schedule
  hdp::Plan three;
  for (hdp::SequenceId id = 0; id < 3; ++id) three.add({0}, {id});
  CHECK(near(hdp::simulate_pipeline(problem({3, 90, 3}, 1, 2, 90), three).makespan_s, 91.5));
}

void test_misplaced() {
  const hdp::Problem two_ranks = problem({4, 4, 4}, 2, 2, 4);
  hdp::Plan plan;
  plan.add({0, 1}, {0});
  plan.add({1}, {1});
  CHECK(hdp::first_misplaced(two_ranks, plan) == -1);
  plan.add({0, 1}, {2});
  CHECK(hdp::first_misplaced(two_ranks, plan) == 2);
  try {
    hdp::simulate_pipeline(two_ranks, plan);
    CHECK(false);
  } catch (const std::invalid_argument&) {
  }
}

void test_rounds() {
  const hdp::Problem some = problem({90, 60, 40, 30, 5}, 8, 4, 20);
  const auto order = hdp::longest_first(some.lengths);
  const auto longs = hdp::long_sequences(some, order);
  CHECK(longs.size() == 4);
  hdp::RoundMaker maker(some, longs);
  std::set<int64_t> seen;
  while (!maker.empty()) {
    const hdp::Round round = maker.take(8, 18);
    int64_t width = 0;
    for (const hdp::Shared& shared : round) {
      width += shared.degree;
      seen.insert(shared.sequence);
    }
    CHECK(width <= 8);
  }
  CHECK(seen == std::set<int64_t>({0, 1, 2, 3}));
}

void test_rounds_count_blocks() {
  hdp::Problem some = problem({60, 40}, 8, 4, 20);
  const auto degrees = [&some](double level_s) {
    const auto longs = hdp::long_sequences(some, {0, 1});
    hdp::RoundMaker maker(some, longs);
    std::vector<int64_t> result;
    for (const hdp::Shared& shared : maker.take(8, level_s)) result.push_back(shared.degree);
    return result;
  };
  CHECK(degrees(20) == std::vector<int64_t>({3, 5}));  // 40 / 3 s and 60 / 5 s
  some.cost.block_s = 3;
  // 60 / 4 + 4 x 3 = 60 / 5 + 5 x 3: a fifth rank saves nothing
  CHECK(degrees(20) == std::vector<int64_t>({4, 3}));
  // blocks of any degree cost more than they save: as few ranks as memory allows
  some.cost.block_s = 20;
  CHECK(degrees(20) == std::vector<int64_t>({3, 2}));
}

void test_lanes_are_ranks_that_are_alike() {
  hdp::Problem some = problem({90, 60, 40, 30, 5}, 8, 4, 20);
  some.speeds = {1, 1, 1, 1, 1, 1, 1, 0.9};
  const auto order = hdp::longest_first(some.lengths);
  const hdp::Seating seating = hdp::seat(some, hdp::long_sequences(some, order), {18, 0, 1e9});
  const hdp::Outline outline = hdp::outline(seating);
  const hdp::Seating& lanes = outline.seating;
  CHECK(lanes.speed.size() < 8);
  CHECK(near(std::accumulate(lanes.weight.begin(), lanes.weight.end(), 0.0), 8));
  for (std::size_t rank = 0; rank < 8; ++rank) {
    const std::size_t lane = outline.lane_of_rank[rank];
    CHECK(lanes.speed[lane] == seating.speed[rank]);
    for (std::size_t round = 0; round < seating.rounds.size(); ++round) {
      CHECK(lanes.rounds[round][lane] == seating.rounds[round][rank]);
    }
  }
}

void test_shares_level_the_ranks() {
  hdp::Seating seating;
  seating.ring_s = {10, 0, 100};
  seating.speed = {1, 0.5, 1};
  seating.weight = {1, 2, 1};
  const std::vector<double> shares = hdp::first_shares(seating, 50);
  // level 30: 20 + 2 x 0.5 x 30 = 50
  CHECK(near(shares[0], 20) && near(shares[1], 15) && shares[2] == 0);
}

void test_fill() {
  const hdp::Problem some = problem({6, 5, 4, 3, 2, 2}, 2, 2, 10);
  const hdp::Shorts shorts(some, hdp::longest_first(some.lengths));
  CHECK(near(shorts.total_s(), 22));
  hdp::Filling filling;
  CHECK(shorts.fill({2, 0}, {11, 11}, 100, filling));
  CHECK(filling.bins[0].size() >= 2);
  CHECK(near(filling.seconds[0] + filling.seconds[1], 22));
  CHECK(near(filling.seconds[0], 11));
  CHECK(shorts.fill({6, 0}, {0, 22}, 100, filling));
  CHECK(filling.bins[0].size() == 6 && filling.bins[1].empty());
  CHECK(!shorts.fill({7, 0}, {11, 11}, 100, filling));
}

void test_balance() {
  const hdp::Problem some = problem({90, 60, 40, 30, 5, 5, 5, 5, 4, 4, 4, 4, 4, 4, 4}, 8, 4, 20);
  const hdp::Plan plan = hdp::pp_balance(some);
  CHECK(hdp::first_misplaced(some, plan) == -1);
  const double least = std::min(hdp::simulate(some, hdp::static_mesh(some)).makespan_s, 1e9);
  CHECK(hdp::simulate(some, plan).makespan_s <= least);
}

}  // namespace

void test_pipelines() {
  test_schedule_of_one_rank();
  test_misplaced();
  test_rounds();
  test_rounds_count_blocks();
  test_lanes_are_ranks_that_are_alike();
  test_shares_level_the_ranks();
  test_fill();
  test_balance();
}
