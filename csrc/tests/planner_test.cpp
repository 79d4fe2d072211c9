// Unit tests of the planner's parts; prints each failed check and returns how many failed.
#include "planner/planner.hpp"

#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "planner/check.hpp"
#include "planner/cost_model.hpp"
#include "planner/degree_search.hpp"
#include "planner/degrees.hpp"
#include "planner/draft.hpp"
#include "planner/node_clocks.hpp"
#include "planner/packing.hpp"
#include "planner/slices.hpp"
#include "planner/sorting.hpp"
#include "planner/spare_room.hpp"

namespace {

int num_failed = 0;

void check_that(bool holds, const char* text, int line) {
  if (holds) return;
  std::printf("line %d: %s\n", line, text);
  ++num_failed;
}

#define CHECK(condition) check_that((condition), #condition, __LINE__)

hdp::Problem problem(std::vector<int64_t> lengths, int64_t num_ranks, int64_t capacity) {
  hdp::Problem result;
  result.lengths = std::move(lengths);
  result.num_ranks = num_ranks;
  result.tokens_per_rank = capacity;
  for (const int64_t length : result.lengths) {
    result.max_length = std::max(result.max_length, length);
  }
  result.cost = {1.0, 2.0, 10.0, 1.0, 1e9, 1e9, 8};
  return result;
}

void test_slices() {
  CHECK(hdp::slice_tokens(7, 1, 4) == 8);
  CHECK(hdp::slice_tokens(25, 3, 1) == 10);
  CHECK(hdp::least_degree(10, 10, 1) == 1);
  CHECK(hdp::least_degree(11, 10, 1) == 2);
  CHECK(hdp::least_degree(5, 1, 1) == 0);
  // the least degree is exact: brute force over odd capacities and multiples
  for (int64_t length = 1; length <= 60; ++length) {
    for (int64_t capacity = 1; capacity <= 13; ++capacity) {
      for (int64_t multiple = 1; multiple <= 4; ++multiple) {
        int64_t expected = 0;
        for (int64_t degree = 64; degree >= 1; --degree) {
          if (hdp::slice_tokens(length, degree, multiple) <= capacity) expected = degree;
        }
        CHECK(hdp::least_degree(length, capacity, multiple) == expected);
      }
    }
  }
}

void test_packing() {
  hdp::BestFit packing(10);
  CHECK(packing.place(6) == 0);
  CHECK(packing.place(7) == 1);
  CHECK(packing.place(3) == 1);  // fills bin 1 exactly rather than bin 0
  CHECK(packing.place(2) == 0);
  CHECK(packing.fits(2) && !packing.fits(3));
  CHECK(packing.place(10) == 2);
  CHECK(packing.num_bins() == 3);
}

void test_cost_model() {
  hdp::CostModel cost{1.0, 2.0, 0.0, 8.0, 1.0, 0.5, 4};
  CHECK(hdp::compute_s(cost, 24) == 624);
  CHECK(hdp::transfer_s(cost, 4, 24, true) == 3 * 0.75 * 24 * 8);
  CHECK(std::abs(hdp::ring_s(cost, 24, 2, true) - 312) < 1e-9);
  CHECK(std::abs(hdp::ring_s(cost, 24, 4, true) - 444) < 1e-9);
  CHECK(hdp::greatest_hidden_degree(cost, 24, 64) == 2);
  CHECK(hdp::greatest_hidden_degree(cost, 2400, 64) == 51);  // 1 + floor(2400 x 0.5 / 24)
  CHECK(hdp::greatest_hidden_degree(cost, 2400, 7) == 7);
  CHECK(hdp::length_within(cost, 624) == 24);
  CHECK(hdp::length_within(cost, 623.9) == 23);
  CHECK(hdp::length_within(cost, 0) == 0);
  CHECK(hdp::length_within({0, 2, 0, 0, 1, 1, 8}, 9) == 4);
  CHECK(hdp::length_within({0, 0, 0, 0, 1, 1, 8}, 0) == int64_t{1} << 41);
}

void test_node_clocks() {
  hdp::NodeClocks clocks(10, 4);  // nodes 0-3, 4-7, 8-9
  CHECK((clocks.earliest(3) == std::vector<int32_t>{0, 1, 2}));
  clocks.set({0, 1, 2}, 5);
  CHECK((clocks.earliest(2) == std::vector<int32_t>{4, 5}));
  clocks.set({4, 5, 6, 7}, 3);
  CHECK((clocks.earliest(2) == std::vector<int32_t>{8, 9}));
  CHECK((clocks.earliest(4) == std::vector<int32_t>{4, 5, 6, 7}));
  CHECK((clocks.earliest(5) == std::vector<int32_t>{3, 4, 5, 8, 9}));
}

void test_degrees() {
  hdp::Problem giant = problem({100}, 8, 60);
  CHECK(hdp::balanced_degree(giant, 100, 1e9) == 2);
  CHECK(hdp::balanced_degree(giant, 100, 10200.0 / 5) == 5);
  CHECK(hdp::balanced_degree(giant, 100, 1) == 8);
  CHECK(hdp::balanced_degree(giant, 5, 0) == 2);  // chunks of at least one token
  CHECK((hdp::balanced_degrees(giant, 10200.0 / 5) == hdp::Degrees{5}));
  CHECK((hdp::widened(problem({9, 9, 9}, 5, 9), {1, 2, 3}) == hdp::Degrees{1, 2, 3}));
  CHECK((hdp::widened(problem({10, 10, 9}, 5, 9), {2, 3, 3}) == hdp::Degrees{2, 5, 3}));
  CHECK(!hdp::may_share(giant, 100, 1) && hdp::may_share(giant, 100, 2));
  CHECK(hdp::may_share(giant, 100, 8) && !hdp::may_share(giant, 100, 9));
  CHECK(hdp::may_share(giant, 5, 2) && !hdp::may_share(giant, 5, 3));
  CHECK(hdp::may_share(problem({61}, 2, 60), 61, 2));
}

void test_leanest_draft() {
  const auto draft = [](double makespan_s, double ring_tokens, int32_t num_micro_batches) {
    hdp::Draft result;
    result.schedule.makespan_s = makespan_s;
    result.schedule.ring_tokens = ring_tokens;
    for (int32_t m = 0; m < num_micro_batches; ++m) result.plan.add({m}, {m});
    return result;
  };
  const std::vector<hdp::Draft> drafts{draft(10, 7, 1), draft(11, 5, 3), draft(11, 5, 2),
                                       draft(11, 5, 2), draft(12, 0, 1)};
  CHECK(&hdp::fastest(drafts) == &drafts[0]);
  CHECK(&hdp::leanest(drafts, 10) == &drafts[0]);
  CHECK(&hdp::leanest(drafts, 11) == &drafts[2]);
  CHECK(&hdp::leanest(drafts, 12) == &drafts[4]);
}

void test_degree_search() {
  // three sequences of time 100 x 102 on three ranks: rings of two run one after the other
  hdp::Problem threes = problem({100, 100, 100}, 3, 60);
  threes.cost.kv_bytes_per_token = 0;
  const std::vector<int64_t> order = hdp::longest_first(threes.lengths);
  hdp::Draft draft = hdp::draft(threes, order, {{2, 2, 2}, false});
  CHECK(std::abs(draft.schedule.makespan_s - 3 * 5110) < 1e-9);
  hdp::speed_up(threes, order, 0, draft);
  CHECK((draft.decisions.degrees == hdp::Degrees{3, 3, 3}));
  CHECK(std::abs(draft.schedule.makespan_s - 3 * 3410) < 1e-9);
  hdp::save_traffic(threes, order, 3 * 3410 + 1700, draft);  // one ring of two costs 1,700 s
  CHECK((draft.decisions.degrees == hdp::Degrees{2, 3, 3}));
  hdp::save_traffic(threes, order, draft.schedule.makespan_s, draft);
  CHECK((draft.decisions.degrees == hdp::Degrees{2, 3, 3}));
}

void test_spare_room() {
  const hdp::Problem shorts = problem({4, 4, 3, 2, 9}, 2, 10);
  hdp::SpareRoom room(shorts, {0, 1, 2, 3});
  std::vector<hdp::Local> locals;
  const double seconds = room.fill({5, 6}, 5, locals);
  CHECK(seconds == hdp::compute_s(shorts.cost, 4));
  CHECK(locals.size() == 2 && locals[0].rank == 5 && locals[1].rank == 6);
  CHECK((locals[0].sequences == std::vector<int64_t>{0}));
  CHECK((locals[1].sequences == std::vector<int64_t>{1}));
  CHECK((room.remaining() == std::vector<int64_t>{2, 3}));
}

void test_schedule() {
  hdp::Problem small = problem({24, 2, 9, 4, 5}, 4, 10);
  hdp::Plan plan;
  plan.add({0, 1, 2}, {0}, {{2, {1}}});
  plan.add({3}, {2});
  plan.add({0}, {3, 4});
  const hdp::Schedule schedule = hdp::simulate(small, plan);
  CHECK(std::abs(schedule.makespan_s - 295) < 1e-9);
  CHECK(schedule.ring_tokens == 48);
  CHECK(schedule.max_tokens_on_a_rank == 10);
}

void test_strategies() {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 200; ++i) lengths.push_back(1 + i * i * 7919 % 701);
  const hdp::Problem mixed = problem(lengths, 13, 101);
  const double balanced = hdp::make_plan(mixed, "dp-balance").schedule.makespan_s;
  CHECK(balanced <= hdp::make_plan(mixed, "naive").schedule.makespan_s);
  CHECK(balanced <= hdp::make_plan(mixed, "static").schedule.makespan_s);
}

void test_errors() {
  const auto message = [](const hdp::Problem& bad) {
    try {
      hdp::make_plan(bad, "naive");
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  CHECK(message(problem({}, 2, 10)) == "there are 0 sequences; expected at least 1");
  CHECK(message(problem({3, 1000}, 8, 100)) ==
        "sequence 1 of the batch has 1,000 tokens and needs 10 ranks at 100 tokens each; there are "
        "8: raise --hdp-tokens-per-rank or add ranks");
  CHECK(message(problem({3}, 8, 0)).find("tokens per rank is 0") == 0);
}

}  // namespace

int main() {
  test_slices();
  test_packing();
  test_cost_model();
  test_node_clocks();
  test_degrees();
  test_leanest_draft();
  test_degree_search();
  test_spare_room();
  test_schedule();
  test_strategies();
  test_errors();
  return num_failed;
}
