// Unit tests of the planner's parts; the program prints each failed check, and fails then.

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "planner/base/cost_model.hpp"
#include "planner/base/place_set.hpp"
#include "planner/base/slices.hpp"
#include "planner/base/sorting.hpp"
#include "planner/schedule/ways.hpp"
#include "planner/baselines/packing.hpp"
#include "planner/bounds/bounds.hpp"
#include "planner/dp_balance/clock_heap.hpp"
#include "planner/dp_balance/decide.hpp"
#include "planner/rings/batch.hpp"
#include "planner/rings/degrees.hpp"
#include "planner/rings/free_ranks.hpp"
#include "planner/rings/rings.hpp"
#include "planner/schedule/schedule.hpp"
#include "tests/checking.hpp"

namespace {

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

TEST(test_slices) {
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

TEST(test_packing) {
  hdp::BestFit packing(10);
  CHECK(packing.place(6) == 0);
  CHECK(packing.place(7) == 1);
  CHECK(packing.place(3) == 1);  // fills bin 1 exactly rather than bin 0
  CHECK(packing.place(2) == 0);
  CHECK(packing.place(10) == 2);
}

// Items that shrink find the same bins in both packings, over and below the capacity.
TEST(test_packing_of_shrinking_items) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const int64_t capacity = 1 + static_cast<int64_t>(random() % 50);
    std::vector<int64_t> items(random() % 300);
    for (int64_t& item : items) item = 1 + static_cast<int64_t>(random() % 60);
    std::sort(items.begin(), items.end(), std::greater<>());
    hdp::BestFit any(capacity);
    int64_t num_bins = 0;
    hdp::BestFitDecreasing shrinking(capacity, items.empty() ? 1 : items.back());
    for (const int64_t item : items) {
      const bool fits = item <= shrinking.most();
      const int64_t bin = any.place(item);
      CHECK(shrinking.place(item) == bin);
      CHECK(fits == (bin < num_bins));
      num_bins = std::max(num_bins, bin + 1);
    }
  }
}

// In any order each item goes to the least room that is enough, of two to the older bin.
TEST(test_best_fit) {
  std::mt19937 random(9);
  for (int round = 0; round < 100; ++round) {
    const int64_t capacity = 1 + static_cast<int64_t>(random() % 20);
    hdp::BestFit packing(capacity);
    std::vector<int64_t> rooms;
    for (std::size_t left = random() % 300; left > 0; --left) {
      const int64_t item = 1 + static_cast<int64_t>(random() % static_cast<unsigned>(capacity));
      std::size_t best = rooms.size();
      for (std::size_t bin = 0; bin < rooms.size(); ++bin) {
        if (rooms[bin] < item) continue;
        if (best == rooms.size() || rooms[bin] < rooms[best]) best = bin;
      }
      if (best == rooms.size()) rooms.push_back(capacity);
      rooms[best] -= item;
      CHECK(packing.place(item) == static_cast<int64_t>(best));
    }
  }
}

// Locals and offload ratios are kept up to the last micro-batch that has any.
TEST(test_what_most_micro_batches_lack) {
  hdp::Plan plan;
  plan.add({0}, {0});
  plan.add({0, 1}, {1}, 0.5);
  plan.locals = {{1, 1}, {2, 3}};
  plan.end_locals(2);
  plan.add({1}, {4});
  CHECK((plan.local_offsets == std::vector<int32_t>{0, 0, 2}));
  CHECK(plan.local_offset(0) == 0 && plan.local_offset(1) == 0 && plan.local_offset(2) == 2);
  CHECK(plan.local_offset(3) == 2);
  CHECK((plan.offload_ratios == std::vector<double>{0, 0.5}));
  CHECK(plan.offload_ratio(0) == 0 && plan.offload_ratio(1) == 0.5 && plan.offload_ratio(2) == 0);
}

TEST(test_place_set) {
  std::mt19937 random(8);
  for (const std::size_t size : {0, 1, 63, 64, 65, 5000, 300000}) {
    hdp::PlaceSet places(size);
    std::set<std::size_t> expected;
    for (int i = 0; size > 0 && i < 2000; ++i) {
      const std::size_t place = random() % size;
      if (random() % 3 > 0) {
        places.insert(place);
        expected.insert(place);
      } else {
        places.erase(place);
        expected.erase(place);
      }
      const std::size_t from = random() % (size + 1);
      const auto next = expected.lower_bound(from);
      CHECK(places.next(from) == (next == expected.end() ? size : *next));
    }
    CHECK(places.next(size) == size && places.size() == size);
  }
}

// What the search takes a sequence to cost is what the schedule says of the micro-batch that it adds.
TEST(test_ways_of_a_sequence) {
  hdp::Problem problem;
  problem.lengths = {400};
  problem.num_ranks = 4;
  problem.tokens_per_rank = 60;
  problem.max_length = 400;
  problem.cost = hdp::CostModel{1e-3, 0.02, 0.5, 8.0, 4.0, 3.0, 2};
  problem.cost.activation_bytes_per_token = 100;
  problem.cost.num_layers = 8;
  problem.cost.host_bytes_per_s = 1e6;
  problem.cost.query_ratio = 0.25;  // queries would travel, of parts
  const std::vector<int32_t> ring{0, 1, 2, 3};
  const auto cost_of = [&](bool is_recomputed, int64_t num_streamed) {
    hdp::Plan plan;
    hdp::add_sequence(problem, ring, 0, plan);
    CHECK(plan.is_recomputed(0) == is_recomputed);
    CHECK((plan.parts_of_stream(0) > 0) == (num_streamed > 0));
    const hdp::Links links = hdp::links_of(problem.cost, plan.ring(0));
    const double seconds = hdp::sequence_s(problem, 400, 4, links);
    CHECK(std::abs(seconds - hdp::micro_batch_load(problem, plan, 0).seconds) < 1e-9 * seconds);
    return seconds;
  };
  bool is_refused = false;
  try {
    cost_of(false, 0);
  } catch (const std::invalid_argument&) {
    is_refused = true;  // a slice has 100 tokens
  }
  CHECK(is_refused);
  problem.streams = true;
  cost_of(false, 1);
  problem.recompute = true;
  problem.cost.input_share = 0.1;
  const double recomputed = cost_of(true, 0);
  problem.cost.double_rings = true;  // two links of 3 bytes a second, and hops within a node of 4
  CHECK(cost_of(true, 0) < recomputed);
  problem.tokens_per_rank = 100;
  CHECK(cost_of(false, 0) < recomputed);
}

TEST(test_cost_model) {
  hdp::CostModel cost{1.0, 2.0, 0.0, 8.0, 1.0, 0.5, 4};
  CHECK(hdp::compute_s(cost, 24) == 624);
  CHECK(hdp::transfer_s(cost, 4, 24, hdp::links_in_a_node(cost)) == 3 * 0.75 * 24 * 8);
  CHECK(std::abs(hdp::ring_s(cost, 24, 2, hdp::links_in_a_node(cost)) - 456) < 1e-9);
  CHECK(std::abs(hdp::ring_s(cost, 24, 4, hdp::links_in_a_node(cost)) - 480) < 1e-9);
  CHECK(hdp::greatest_hidden_degree(cost, 24, 64) == 2);
  CHECK(hdp::greatest_hidden_degree(cost, 2400, 64) == 51);  // 1 + floor(2400 x 0.5 / 24)
  CHECK(hdp::greatest_hidden_degree(cost, 2400, 7) == 7);
  // two hops of 64 and 128 s, 7 s more each; 64 and 128 s of attention a step
  cost.intra_node_hop_all_layers_s = 7;
  CHECK(std::abs(hdp::exposed_s(cost, 3, 24, 576, hdp::links_in_a_node(cost)) - 28) < 1e-9);
  CHECK(hdp::greatest_hidden_degree(cost, 2400, 4) == 4);
  CHECK(hdp::greatest_hidden_degree(cost, 24, 4) == 1);
  cost.inter_node_hop_all_layers_s = 39900;
  // 6 (39900 + 38400 / 7) < 1920000 / 7, 7 (39900 + 38400 / 8) > 1920000 / 8
  CHECK(hdp::greatest_hidden_degree(cost, 2400, 64) == 7);
  cost.block_all_layers_s = 1;
  cost.g = 2;
  CHECK(hdp::fixed_s(cost, 3) == 5);
  CHECK(hdp::parts_within(cost, 9, 12, 7) == 3);  // 12 / 3 + 3, as 12 / 4 + 4
  CHECK(std::isinf(hdp::parts_within(cost, 9, 12, 6)));
  const double without = hdp::ring_s(cost, 24, 4, hdp::links_in_a_node(cost), 2);
  cost.merge_b = 1;
  CHECK(std::abs(hdp::ring_s(cost, 24, 4, hdp::links_in_a_node(cost), 2) - without - 9) <
        1e-9);                                     // 3 steps of 6 tokens
  CHECK(hdp::parts_within(cost, 8, 20, 15) == 3);  // 20 / 3 + 2 steps of 8 / 3 tokens + 3
  CHECK(std::isinf(hdp::parts_within(cost, 8, 20, 8)));
  CHECK(hdp::parts_within(cost, 8, 7, 8) == 1 && std::isinf(hdp::parts_within(cost, 8, 7, 7)));
  CHECK(hdp::length_within(cost, 624) == 24);
  CHECK(hdp::length_within(cost, 623.9) == 23);
  CHECK(hdp::length_within(cost, 0) == 0);
  CHECK(hdp::length_within({0, 2, 0, 0, 1, 1, 8}, 9) == 4);
  CHECK(hdp::length_within({0, 0, 0, 0, 1, 1, 8}, 0) == int64_t{1} << 41);
}

TEST(test_sorting) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 5000; ++i)
    lengths.push_back(1 + i * 7919 % 4099 * (i % 3 == 0 ? 1 << 20 : 1));
  const std::vector<hdp::SequenceId> order = hdp::longest_first(lengths);
  const hdp::SortedLengths sorted(lengths, order);
  CHECK(order.size() == lengths.size() && sorted.size() == lengths.size());
  for (std::size_t i = 1; i < order.size(); ++i) {
    CHECK(sorted[i] == lengths[hdp::index(order[i])]);
    CHECK(sorted.first_within(sorted[i]) <= i && sorted.first_within(sorted[i] - 1) > i);
    const auto left = hdp::index(order[i - 1]);
    const auto right = hdp::index(order[i]);
    CHECK(lengths[left] > lengths[right] || (lengths[left] == lengths[right] && left < right));
  }
  CHECK((hdp::longest_first({3, 9, 3, 1}) == std::vector<hdp::SequenceId>{1, 0, 2, 3}));
  const hdp::Lengths four_bytes{3, 9, 4294967295, 9};
  const hdp::SortedLengths few(four_bytes, hdp::longest_first(four_bytes));
  CHECK(few[0] == 4294967295 && few[1] == 9 && few[3] == 3);
  CHECK(few.first_within(int64_t{1} << 40) == 0 && few.first_within(8) == 3);
  CHECK(few.first_within(2) == 4);
}

TEST(test_clock_heap) {
  hdp::ClockHeap heap({5, 1, 3, 1});
  CHECK(heap.rank(0) == 1 && heap.clock(0) == 1);
  heap.advance(0, 4);
  CHECK(heap.rank(0) == 3);
  heap.advance(0, 9);
  CHECK(heap.rank(0) == 2);
  heap.advance(0, 4);  // of equals the lower rank
  CHECK(heap.rank(0) == 1 && heap.clock(0) == 4);
}

TEST(test_free_ranks) {
  using Ranks = std::vector<int32_t>;
  hdp::FreeRanks free({0, 1, 2, 3, 4, 5, 6, 7});
  CHECK((free.take(4) == Ranks{0, 1, 2, 3}));
  free.give_back({0, 1, 2, 3}, 2);
  CHECK((free.take(2) == Ranks{4, 5}));
  free.give_back({4, 5}, 1);
  // the fourth rank is free at 2: those free at 2 wait least
  CHECK((free.take(5) == Ranks{0, 1, 2, 3, 4}));
  free.give_back({0, 1, 2, 3, 4}, 3);
  CHECK((free.take(2) == Ranks{6, 7}));
  free.give_back({6, 7}, 5);
  free.remove({true, true, true, true, true, true, true, false});
  CHECK((free.take(7) == Ranks{0, 1, 2, 3, 4, 5, 6}));

  hdp::FreeRanks preferring({3, 2, 1, 0});
  CHECK((preferring.take(2) == Ranks{3, 2}));
}

TEST(test_node_ranks) {
  using Ranks = std::vector<int32_t>;
  const std::vector<double> clocks{0, 0, 0, 5, 0, 1, 1, 1, 0, 0};
  const std::vector<bool> all(10, true);
  hdp::NodeRanks nodes(clocks, all, 4);  // 0-3, 4-7, 8-9
  CHECK((nodes.take(4) == Ranks{4, 5, 6, 7}));
  nodes.give_back(6);
  CHECK((nodes.take(3) == Ranks{0, 1, 2}));
  nodes.give_back(7);
  CHECK((nodes.take(2) == Ranks{8, 9}));
  nodes.give_back(9);
  CHECK((nodes.take(2) == Ranks{4, 5}));
  nodes.give_back(8);
  CHECK((nodes.take(1) == Ranks{3}));

  // the second rank of node 0 is free at 2: rank 2 waits least with rank 1 or 3
  hdp::NodeRanks waiting({0, 2, 2, 2}, {true, true, false, true}, 4);
  CHECK((waiting.take(2) == Ranks{1, 3}));
}

TEST(test_degrees) {
  const hdp::Problem giant = problem({100}, 8, 60);
  const hdp::Batch batch(giant);
  CHECK((hdp::balanced_degrees(batch, {8, false}, 1e9) == hdp::Degrees{2}));
  CHECK((hdp::balanced_degrees(batch, {8, false}, 10200.0 / 4) == hdp::Degrees{4}));
  CHECK((hdp::balanced_degrees(batch, {8, false}, 10200.0 / 5) == hdp::Degrees{8}));
  CHECK((hdp::balanced_degrees(batch, {7, false}, 10200.0 / 4) == hdp::Degrees{7}));
  CHECK((hdp::balanced_degrees(batch, {7, false}, 10200.0 / 2) == hdp::Degrees{3}));
  CHECK(hdp::least_nested({12, false}, 4, 7) == 6);
  CHECK(hdp::least_nested({12, false}, 7, 11) == 0);
  CHECK(hdp::least_nested({12, false}, 1, 1) == 1);
  CHECK(hdp::least_nested({12, false}, 2, 12) == 3);
  CHECK(hdp::least_nested({12, true}, 7, 11) == 9);
  CHECK(hdp::least_nested({12, true}, 4, 5) == 4);
  CHECK(hdp::least_nested({12, true}, 2, 12) == 2);
  CHECK(hdp::greatest_nested({12, true}, 2, 11) == 9);
  CHECK(hdp::greatest_nested({12, true}, 7, 8) == 0);
  CHECK(!hdp::may_share(giant, 100, 2, 1) && hdp::may_share(giant, 100, 2, 2));
  CHECK(hdp::may_share(giant, 100, 2, 8) && !hdp::may_share(giant, 100, 2, 9));
  CHECK(hdp::may_share(giant, 5, 1, 2) && !hdp::may_share(giant, 5, 1, 3));
}

TEST(test_rings_nest) {
  // four of degree 2 and one of degree 4 on 8 ranks: nobody waits
  hdp::Problem nested = problem({100, 50, 50, 50, 50}, 8, 60);
  const hdp::Batch batch(nested);
  const hdp::RingSchedule rings = hdp::place_rings(batch, {{4, 2, 2, 2, 2}});
  CHECK(rings.gaps.empty() && rings.places.size() == 5);
  CHECK((rings.ring(0) == std::vector<int32_t>{0, 1, 2, 3}));
  CHECK((rings.ring(1) == std::vector<int32_t>{4, 5}));
  CHECK((rings.ring(2) == std::vector<int32_t>{6, 7}));
  CHECK((rings.ring(3) == std::vector<int32_t>{4, 5}));
  // a slow rank stays out of rings that do without it
  nested.speeds = {1, 0.5, 1, 1, 1, 1, 1, 1};
  const hdp::RingSchedule fast = hdp::place_rings(batch, {{7, 2, 2, 2, 2}, false, 0.9});
  CHECK((fast.ring(0) == std::vector<int32_t>{0, 2, 3, 4, 5, 6, 7}));
  for (std::size_t i = 0; i < fast.places.size(); ++i) {
    for (const int32_t rank : fast.ring(i)) CHECK(rank != 1);
  }
}

TEST(test_columns) {
  // compute 100 x 102 and 60 x 62 (and 20 x 22), at most 60 tokens on a rank
  const hdp::Problem columns = problem({100, 60, 20}, 8, 60);
  const hdp::Batch batch(columns);
  hdp::FreeRanks free({0, 1, 2, 3, 4, 5, 6, 7});
  // three ranks take 3400 + g
  CHECK(hdp::best_column(batch, free, 0, 3409).degree == 4);
  CHECK(hdp::best_column(batch, free, 0, 3410).degree == 3);
  CHECK(hdp::best_column(batch, free, 0, 9000).degree == 2);  // memory
  CHECK(hdp::best_column(batch, free, 0, 100).degree == 0);   // more than all ranks
  free.give_back(free.take_from(0, 3), 3000);
  // the short one fills what is left above the clock of the three rather than the others
  const hdp::Column column = hdp::best_column(batch, free, 2, 3460);
  CHECK(column.degree == 1 && free.groups()[column.group].clock == 3000);
  CHECK((free.take_from(column.group, 2) == std::vector<int32_t>{0, 1}));
  // a plan made of columns: the long one on three ranks, the next beside it
  hdp::Decisions decisions{{3, 2, 2}};
  decisions.column_s = 3420;
  hdp::Problem scattered = columns;
  scattered.cost.ranks_per_node = 1;
  const hdp::Batch alone(scattered);
  const hdp::RingSchedule rings = hdp::place_rings(alone, decisions);
  CHECK((rings.ring(0) == std::vector<int32_t>{0, 1, 2}));
  CHECK((rings.ring(1) == std::vector<int32_t>{3, 4}));
  CHECK(rings.gaps.empty());
}

TEST(test_degree_search) {
  // three sequences of time 100 x 102 on three ranks: rings of two run one after the other
  hdp::Problem threes = problem({100, 100, 100}, 3, 60);
  threes.cost.kv_bytes_per_token = 0;
  const hdp::Batch batch(threes);
  const hdp::Candidate start(batch, {{2, 2, 2}});
  CHECK(std::abs(start.level.makespan_s - 3 * 5110) < 1e-9);
  int64_t num_tries = 100;
  const hdp::Candidate found = hdp::search_degrees(batch, start, 0, num_tries);
  CHECK((found.decisions.degrees == hdp::Degrees{3, 3, 3}));
  CHECK(std::abs(found.level.makespan_s - 3 * 3410) < 1e-9);
  CHECK(num_tries > 0);
  num_tries = 0;
  CHECK(
      (hdp::search_degrees(batch, start, 0, num_tries).decisions.degrees == hdp::Degrees{2, 2, 2}));
}

TEST(test_bounds) {
  // 24 tokens: 312 s of compute on two ranks, and 288 s of transfer of which 144 s hide
  hdp::Problem slow = problem({24}, 4, 24);
  slow.cost = {1.0, 2.0, 0.0, 8.0, 1.0, 1.0, 8};
  CHECK(std::abs(hdp::lower_bound_s(slow) - 456) < 1e-9);
  CHECK(std::abs(hdp::tight_bound_s(slow) - 456) < 1e-9);
  // 200 tokens take 594 s of transfer on 100 ranks, where all steps but the last of 40000 s of
  // attention hide 396 s of it: all ranks lose 198 s if it is to end after 798 s, and nothing else
  // can run meanwhile
  hdp::Problem exposed = problem({200, 20}, 100, 200);
  exposed.cost = {1.0, 100.0, 0.0, 1.0, 1.0, 1.0, 8};
  const double bound = hdp::lower_bound_s(exposed);
  CHECK(std::abs(bound - (60000 / 100.0 + 198)) < 1e-9);
  CHECK(hdp::tight_bound_s(exposed) > 1.005 * bound);
  CHECK(hdp::tight_bound_s(exposed) < 1.03 * bound);
  // memory makes the slow rank share what the fast one alone would do in 110 s
  hdp::Problem forced = problem({10}, 2, 6);
  forced.cost = {1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 8};
  forced.speeds = {1.0, 0.1};
  CHECK(std::abs(hdp::lower_bound_s(forced) - 110) < 1e-9);
  CHECK(std::abs(hdp::tight_bound_s(forced) - 550) < 1e-9);
}

TEST(test_spare_room) {
  const hdp::Problem shorts = problem({9, 4, 4, 3, 2}, 2, 10);
  const hdp::Batch batch(shorts);
  hdp::SpareRoom room(batch, hdp::places_of_shorts(batch, hdp::Degrees{2, 1, 1, 1, 1}));
  hdp::Locals locals;
  const double seconds = room.fill({5, 6}, 5, locals);
  CHECK(seconds == hdp::compute_s(shorts.cost, 4));
  CHECK((locals.ranks == std::vector<int32_t>{5, 6}));
  CHECK((locals.sequences == std::vector<hdp::SequenceId>{1, 2}));
  const hdp::PlaceSet left = room.take_remaining();
  CHECK(left.next(0) == 3 && left.next(4) == 4 && left.next(5) == left.size());
}

}  // namespace

int main() { return hdp_tests::run_tests(); }
