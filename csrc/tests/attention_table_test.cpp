// Attention as a table: lines through the points, exact and never falling, and their inverse.
#include "planner/base/attention_table.hpp"

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "planner/base/cost_model.hpp"
#include "planner/planner.hpp"
#include "planner/pp_balance/rounds.hpp"
#include "tests/checking.hpp"

namespace {

using Points = std::vector<hdp::AttentionPoint>;

hdp::CostModel model(Points points, double b) {
  hdp::CostModel cost;
  cost.linear_s_per_token = b;
  cost.attention = hdp::AttentionTable(std::move(points));
  return cost;
}

TEST(test_lines) {
  const hdp::AttentionTable table({{10, 5}, {30, 45}, {40, 45}, {50, 55}});
  for (const auto& [length, seconds] : Points{{0, 0},
                                              {2, 1},
                                              {10, 5},
                                              {20, 25},
                                              {30, 45},
                                              {37, 45},
                                              {40, 45},
                                              {45, 50},
                                              {50, 55},
                                              {51, 56},
                                              {1050, 1055}}) {
    CHECK(table.seconds(length) == seconds);
  }
  CHECK(table.seconds(int64_t{1} << 41) == 55 + static_cast<double>((int64_t{1} << 41) - 50));
  CHECK(!table.rises_per_token());  // 45 / 30 > 45 / 40
  CHECK(table.most_per_token(5) == 0.5 && table.most_per_token(20) == 1.25);
  CHECK(table.most_per_token(30) == 1.5 && table.most_per_token(1000) == 1.5);
  CHECK(hdp::AttentionTable().rises_per_token());
  CHECK(hdp::AttentionTable({{3, 0.1 * 3}, {7, 0.1 * 7}, {1001, 0.1 * 1001}}).rises_per_token());
  CHECK(hdp::AttentionTable({{4, 0}, {8, 16}, {9, 24}}).rises_per_token());
  CHECK(!hdp::AttentionTable({{4, 16}, {8, 24}}).rises_per_token());
}

// The line of every length is the one that a search through all points finds.
TEST(test_the_line_is_found) {
  Points points;
  for (int64_t length = 1; length < 3000; length += 1 + length / 40 + length % 3) {
    points.push_back({length, static_cast<double>(length * length)});
  }
  const hdp::AttentionTable table(points);
  for (std::size_t i = 1; i < points.size(); ++i) {
    const hdp::AttentionPoint left = points[i - 1];
    const hdp::AttentionPoint right = points[i];
    CHECK(table.seconds(left.length) == left.seconds);
    for (int64_t length = left.length; length < right.length; ++length) {
      const auto part = static_cast<double>(length - left.length) /
                        static_cast<double>(right.length - left.length);
      const double expected = left.seconds + part * (right.seconds - left.seconds);
      CHECK(std::abs(table.seconds(length) - expected) <= 1e-12 * expected);
    }
  }
}

// Lines so flat that rounding decides from one length to the next.
TEST(test_seconds_never_fall) {
  const double next = std::nextafter(0.3, 1.0);
  const hdp::CostModel flat = model({{7, 0.1}, {900, 0.3}, {1800, next}, {1801, next}}, 1e-19);
  double last = 0;
  for (int64_t length = 0; length < 4000; ++length) {
    const double seconds = hdp::compute_s(flat, length);
    CHECK(seconds >= last);
    last = seconds;
  }
}

TEST(test_the_greatest_length_within) {
  const double third = 1.0 / 3;
  for (const double b : {0.0, 1e-3, 1.0}) {
    const hdp::CostModel cost =
        model({{3, 0}, {10, 5 * third}, {11, 5 * third}, {500, 7}, {90000, 1e9 * third}}, b);
    for (const int64_t length : {0, 1, 3, 4, 9, 10, 12, 499, 500, 501, 70001, 90000, 123456789}) {
      const double seconds = hdp::compute_s(cost, length);
      const int64_t greatest = hdp::length_within(cost, seconds);
      CHECK(greatest >= length && hdp::compute_s(cost, greatest) <= seconds);
      CHECK(hdp::compute_s(cost, greatest + 1) > seconds);
      const double less = std::nextafter(seconds, -1.0);
      CHECK(length == 0 || hdp::length_within(cost, less) < length);
    }
  }
  CHECK(hdp::length_within(model({{10, 0}}, 0), 0) == int64_t{1} << 41);
  CHECK(hdp::length_within(model({{10, 0}, {11, 1}}, 0), 0) == 10);
}

TEST(test_what_hides) {
  hdp::CostModel cost = model({{10, 10}, {20, 60}}, 1);
  cost.kv_bytes_per_token = 0.5;
  CHECK(hdp::compute_s(cost, 20) == 80);
  CHECK(hdp::ring_s(cost, 20, 2, hdp::links_in_a_node(cost)) ==
        40);  // 15 s sent under 15 s of attention
  CHECK(hdp::ring_s(cost, 10, 2, hdp::links_in_a_node(cost)) == 10 + 5);  // 7.5 s sent under 2.5 s
  CHECK(hdp::greatest_hidden_degree(cost, 20, 8) == 3 &&
        hdp::transfer_s(cost, 2, 20, hdp::links_in_a_node(cost)) == 15);
  CHECK(hdp::greatest_hidden_degree(cost, 10, 8) == 1);
}

// Rounds search sequences by their degrees, which have to fall with the length.
TEST(test_shorter_sequences_are_not_wider) {
  hdp::Problem problem;
  problem.lengths = {160, 80, 40, 20};
  problem.num_ranks = 16;
  problem.tokens_per_rank = 18;
  problem.cost = model({{20, 200}, {160, 480}}, 0);
  problem.cost.kv_bytes_per_token = 1;
  CHECK(hdp::greatest_hidden_degree(problem.cost, 20, 16) == 4);
  CHECK(hdp::greatest_hidden_degree(problem.cost, 160, 16) == 2);
  const std::vector<hdp::LongSequence> longs =
      hdp::long_sequences(problem, {0, 1, 2, 3}, hdp::kInfinity);
  std::vector<int64_t> greatest;
  for (const hdp::LongSequence& one : longs) greatest.push_back(one.greatest);
  CHECK((greatest == std::vector<int64_t>{9, 5, 3, 3}));
}

std::string refusal(const hdp::CostModel& cost) {
  hdp::Problem problem;
  problem.lengths = {1};
  problem.cost = cost;
  return hdp_tests::refusal([&] { hdp::make_plan(problem, "naive"); });
}

TEST(test_refusals) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto says = [](const hdp::CostModel& cost, const char* text) {
    return refusal(cost).find(text) != std::string::npos;
  };
  CHECK(refusal(model({{1, 0}, {1000, 2}}, 0)) == "no error");
  CHECK(says(model({{0, 1}}, 0), "length of a point of attention_points is 0; expected 1 to"));
  CHECK(says(model({{5, 1}, {1000, 2}, {1000, 2}}, 0), "has 1,000 tokens behind 1,000; expected"));
  CHECK(says(model({{5, 1}, {6, 0.5}}, 0), "has 0.5 s for 6 tokens; expected a finite number of"));
  CHECK(says(model({{5, nan}}, 0), "has nan s for 5 tokens"));
  CHECK(says(model({{5, -1}}, 0), "has -1 s for 5 tokens"));
  CHECK(says(model({{5, 1e31}}, 0), "and at most 1e+30"));
  hdp::CostModel both = model({{5, 1}}, 0);
  both.a = 2;
  CHECK(says(both, "a is 2 beside attention_points; expected 0"));
}

}  // namespace
