// Unit tests of what pipelines need.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <stdexcept>

#include "planner/base/parts.hpp"
#include "planner/base/side_by_side.hpp"
#include "planner/base/sorting.hpp"
#include "planner/baselines/baselines.hpp"
#include "planner/pp_balance/fill.hpp"
#include "planner/pp_balance/pp_balance.hpp"
#include "planner/pp_balance/rounds.hpp"
#include "planner/pp_balance/seats.hpp"
#include "planner/pp_balance/slots.hpp"
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
  result.cost.linear_s_per_token = 1;
  return result;
}

TEST(test_misplaced) {
  const hdp::Problem two_ranks = problem({4, 4, 4}, 2, 2, 4);
  hdp::Plan plan;
  plan.add({0, 1}, {0});
  plan.add({1}, {1});
  CHECK(hdp::first_misplaced(two_ranks, plan) == -1);
  plan.add({0, 1}, {2});
  CHECK(hdp::first_misplaced(two_ranks, plan) == 2);
  CHECK(hdp_tests::is_refused([&] { hdp::simulate_pipeline(two_ranks, plan); }));
}

TEST(test_rounds) {
  const hdp::Problem some = problem({90, 60, 40, 30, 5}, 8, 4, 20);
  const auto order = hdp::longest_first(some.lengths);
  const auto longs = hdp::long_sequences(some, order, hdp::kInfinity);
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

TEST(test_rounds_count_blocks) {
  hdp::Problem some = problem({60, 40}, 8, 4, 20);
  const auto degrees = [&some](double level_s) {
    const auto longs = hdp::long_sequences(some, {0, 1}, hdp::kInfinity);
    hdp::RoundMaker maker(some, longs);
    std::vector<int64_t> result;
    for (const hdp::Shared& shared : maker.take(8, level_s)) result.push_back(shared.degree);
    return result;
  };
  CHECK(degrees(20) == std::vector<int64_t>({3, 5}));  // 40 / 3 s and 60 / 5 s
  some.cost.block_all_layers_s = 3;
  // 60 / 4 + 4 x 3 = 60 / 5 + 5 x 3: a fifth rank saves nothing
  CHECK(degrees(20) == std::vector<int64_t>({4, 3}));
  // blocks of any degree cost more than they save: as few ranks as memory allows
  some.cost.block_all_layers_s = 20;
  CHECK(degrees(20) == std::vector<int64_t>({3, 2}));
}

TEST(test_lanes_are_ranks_that_are_alike) {
  hdp::Problem some = problem({90, 60, 40, 30, 5}, 8, 4, 20);
  some.speeds = {1, 1, 1, 1, 1, 1, 1, 0.9};
  const auto order = hdp::longest_first(some.lengths);
  const auto longs = hdp::long_sequences(some, order, hdp::kInfinity);
  const hdp::Seating seating = hdp::seat(some, longs, {18, 0, 1e9});
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

TEST(test_shares_level_the_ranks) {
  hdp::Seating seating;
  seating.ring_s = {10, 0, 100};
  seating.speed = {1, 0.5, 1};
  seating.weight = {1, 2, 1};
  const std::vector<double> shares = hdp::first_shares(seating, 50);
  // level 30: 20 + 2 x 0.5 x 30 = 50
  CHECK(near(shares[0], 20) && near(shares[1], 15) && shares[2] == 0);
}

hdp::Slot slot(double wanted_s, bool is_needed) {
  hdp::Slot result;
  result.wanted_s = wanted_s;
  result.is_needed = is_needed;
  return result;
}

TEST(test_fill) {
  const hdp::Problem some = problem({6, 5, 4, 3, 2, 2}, 2, 2, 10);
  const auto all = hdp::whole_sequences(some, hdp::longest_first(some.lengths));
  const hdp::Shorts shorts(some, all, 0);
  CHECK(shorts.size() == 6 && near(shorts.total_s(), 22));
  hdp::Filling filling;
  const std::vector<hdp::Slot> alike(2, slot(5.5, false));
  CHECK(shorts.fill({{slot(3, true), slot(8, true)}, alike}, filling));
  CHECK(near(filling.seconds[0], 11) && near(filling.seconds[1], 11));
  // the fuller one stands where more was wanted
  const auto seconds = [&](const hdp::Bin& bin) {
    double sum = 0;
    for (const hdp::SequenceId id : bin) {
      sum += static_cast<double>(some.lengths[hdp::index(id)]);
    }
    return sum;
  };
  CHECK(filling.bins[0].size() == 2);
  CHECK(seconds(filling.bins[0][0]) < seconds(filling.bins[0][1]));
  // none may stay empty, whatever they want
  std::vector<hdp::Slot> needed(6, slot(0, true));
  CHECK(shorts.fill({needed, {}}, filling));
  CHECK(filling.bins[0].size() == 6 && filling.bins[1].empty());
  needed.push_back(slot(0, true));
  CHECK(!shorts.fill({needed, {}}, filling));
}

TEST(test_a_sequence_for_oneself_gets_company) {
  // the third takes longer than 15 s: it gets a place in a round, alone
  const hdp::Problem some = problem({60, 40, 18, 2, 2}, 5, 2, 20);
  const auto order = hdp::longest_first(some.lengths);
  const auto longs = hdp::long_sequences(some, order, 15);
  CHECK(longs.size() == 3 && longs[2].place == 2 && longs[2].least == 1);
  CHECK(hdp::long_sequences(some, order, 18).size() == 2);
  const hdp::Seating seating = hdp::seat(some, longs, {18, 0, 1e9});
  std::size_t alone = hdp::kNoRing;
  for (std::size_t i = 0; i < seating.rings.size(); ++i) {
    CHECK(seating.rings[i].alone == (seating.rings[i].place == 2));
    if (seating.rings[i].alone) alone = i;
  }
  const auto rank = hdp::index(seating.rings[alone].lanes.front());
  const auto all = hdp::whole_sequences(some, order);
  const hdp::Shorts shorts(some, all, longs.size());
  hdp::Rows rows(seating.rounds.size());
  std::iota(rows.begin(), rows.end(), 0);
  const hdp::OwnSlots own(some, seating, shorts, rows, 30);
  std::vector<std::vector<hdp::Slot>> slots;
  for (std::size_t i = 0; i < 5; ++i) slots.push_back(own.of(i, i == rank ? 4 : 0));
  double wanted_s = 0;
  for (const hdp::Slot& one : slots[rank]) wanted_s += one.wanted_s;
  CHECK(near(wanted_s, 18 + 4));
  hdp::Filling filling;
  CHECK(shorts.fill(slots, filling));
  bool is_there = false;
  for (const hdp::Bin& bin : filling.bins[rank]) {
    is_there = is_there || std::count(bin.begin(), bin.end(), 2) == 1;
  }
  CHECK(is_there);
}

TEST(test_counts_are_multiples_of_a_group) {
  hdp::Problem some = problem({60, 5, 5, 5, 5, 5}, 4, 2, 20);
  some.model_chunks = 2;
  const auto order = hdp::longest_first(some.lengths);
  const auto longs = hdp::long_sequences(some, order, hdp::kInfinity);
  const hdp::Seating seating = hdp::seat(some, longs, {1, 0, 1e9});
  const auto all = hdp::whole_sequences(some, order);
  const hdp::Shorts shorts(some, all, longs.size());
  const hdp::OwnSlots own(some, seating, shorts, {0}, 1);
  // the ring's partner wants the ring's time
  const std::vector<hdp::Slot> slots = own.of(0, 15);
  CHECK(slots.size() == 1 && near(slots[0].wanted_s, 15));
  for (const double share_s : {3.0, 17.0, 25.0, 90.0}) {
    CHECK((1 + own.of(0, share_s).size()) % 2 == 0);
  }
}

TEST(test_side_by_side) {
  std::vector<int> calls(100, 0);
  hdp::side_by_side(calls.size(), [&](std::size_t i) { ++calls[i]; });
  CHECK(calls == std::vector<int>(100, 1));
  hdp::side_by_side(0, [](std::size_t) { CHECK(false); });
  for (const std::size_t bad : {std::size_t{0}, std::size_t{99}}) {
    CHECK(hdp_tests::is_refused([&] {
      hdp::side_by_side(100, [&](std::size_t i) {
        if (i == bad) throw std::invalid_argument("a task");
      });
    }));
  }
}

TEST(test_balance) {
  const hdp::Problem some = problem({90, 60, 40, 30, 5, 5, 5, 5, 4, 4, 4, 4, 4, 4, 4}, 8, 4, 20);
  const hdp::Plan plan = hdp::pp_balance(some);
  CHECK(hdp::first_misplaced(some, plan) == -1);
  const double least = std::min(hdp::simulate(some, hdp::static_mesh(some)).makespan_s, 1e9);
  CHECK(hdp::simulate(some, plan).makespan_s <= least);
}

// Of three parts of 3 s each stage of two begins a part behind: 1 and 2 s of a part's 9 on each.
TEST(test_streamed) {
  hdp::Problem one = problem({18}, 1, 2, 18);
  hdp::Plan plan;
  plan.add({0}, {0});
  CHECK(near(hdp::simulate(one, plan).makespan_s, 18));
  plan.num_parts = {3};
  CHECK(near(hdp::simulate(one, plan).makespan_s, 9 + 3));
  const hdp::Problem two = problem({18, 9, 9}, 2, 2, 18);
  hdp::Plan rings;
  rings.add({0}, {1});
  rings.add({1}, {2});
  rings.add({0, 1}, {0});
  rings.num_parts = {1, 3, 2};
  // the second rank waits for the first one at the ring
  CHECK(near(hdp::simulate(two, rings).makespan_s, hdp::run_pipeline(two, rings).ends[1]));
  CHECK(hdp::simulate(two, rings).makespan_s > 9);
}

TEST(test_sizes_of_parts) {
  // 6 x 10 of 8 x 15 = 120: a half
  const auto sizes = hdp::part_sizes({8}, 2, 7);
  CHECK(sizes.size() == 2);
  CHECK(near(sizes[0].tokens + sizes[1].tokens, 8));
  CHECK(near(sizes[0].tokens * (sizes[0].tokens + 7), 60));
  CHECK(near(sizes[1].earlier, sizes[0].tokens) && sizes[0].earlier == 0);
  CHECK(near(sizes[0].squares + sizes[1].squares, 64));
  const auto pack = hdp::part_sizes({4, 4, 4}, 3, 1);  // between sequences
  for (const hdp::PartSize& size : pack) CHECK(near(size.tokens, 4) && size.earlier == 0);
  CHECK(near(hdp::traffic_tokens({2, 6, 0}, 0), 8));   // keys travel
  CHECK(near(hdp::traffic_tokens({2, 6, 0}, 3), 6));   // queries do
  CHECK(near(hdp::traffic_tokens({2, 1, 0}, 3), 3));
}

TEST(test_balance_in_parts) {
  hdp::Problem some = problem({90, 60, 40, 30, 5, 5, 5, 5, 4, 4, 4, 4, 4, 4, 4}, 8, 4, 20);
  const double whole_s = hdp::simulate(some, hdp::pp_balance(some)).makespan_s;
  some.sequence_parts = 16;
  const hdp::Plan plan = hdp::pp_balance(some);
  CHECK(plan.num_parts.size() == hdp::index(plan.num_micro_batches()));
  CHECK(hdp::first_misplaced(some, plan) == -1);
  CHECK(hdp::simulate(some, plan).makespan_s < 0.9 * whole_s);
}

}  // namespace
