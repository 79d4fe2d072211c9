// Unit tests of planner/base/memory.hpp: brute force over small numbers, and cases computed by
// hand.
#include "planner/base/memory.hpp"

#include "planner/base/cost_model.hpp"
#include "planner/base/slices.hpp"
#include "tests/checking.hpp"

namespace {

// 1 s a token; one byte of activations a token; the host takes `host` bytes a second.
hdp::Problem problem(int64_t capacity, int64_t multiple, int64_t layers, double host) {
  hdp::Problem result;
  result.num_ranks = 128;
  result.tokens_per_rank = capacity;
  result.slice_multiple = multiple;
  result.offload = true;
  result.cost.linear_s_per_token = 1;
  result.cost.activation_bytes_per_token = 1;
  result.cost.host_bytes_per_s = host;
  result.cost.num_layers = layers;
  return result;
}

// Whether some ratio on a fine grid fits and reaches the host: written apart from memory.cpp.
bool fits(const hdp::Problem& p, int64_t length, int64_t degree) {
  const int64_t tokens = hdp::slice_tokens(length, degree, p.slice_multiple);
  if (tokens <= p.tokens_per_rank) return true;
  const int64_t layers = p.cost.num_layers;
  if (!p.offload || p.cost.activation_bytes_per_token == 0 || layers <= 2) return false;
  // with ratio 1 two layers stay; with less, tokens - capacity of the tokens have to leave
  if (2 * tokens > p.tokens_per_rank * layers) return false;
  return 3 * degree * (tokens - p.tokens_per_rank) <=
         static_cast<int64_t>(p.cost.host_bytes_per_s) * length;
}

TEST(test_brute_force) {
  for (const double host : {1.0, 2.0, 3.0, 100.0}) {
    for (int64_t capacity = 1; capacity <= 11; ++capacity) {
      for (int64_t multiple = 1; multiple <= 4; ++multiple) {
        for (const int64_t layers : {1, 2, 3, 4, 7}) {
          const hdp::Problem p = problem(capacity, multiple, layers, host);
          for (int64_t length = 1; length <= 60; ++length) {
            int64_t expected = 0;
            for (int64_t degree = p.num_ranks; degree >= 1; --degree) {
              const std::optional<double> ratio = hdp::offload_ratio(p, length, degree);
              CHECK(ratio.has_value() == fits(p, length, degree));
              if (ratio) expected = degree;
            }
            CHECK(hdp::least_degree(p, length) == expected);
          }
        }
      }
    }
  }
}

// The ratio is enough, and one step less is not.
TEST(test_least_ratio) {
  for (const int64_t layers : {3, 4, 32, 80, 1 << 20}) {
    for (const int64_t capacity : {int64_t{8}, int64_t{8192}, int64_t{1} << 39}) {
      const hdp::Problem p = problem(capacity, 1, layers, 1e15);
      const int64_t most = capacity * layers / 2;
      for (const int64_t beyond : {int64_t{1}, capacity / 3, capacity / 2, most - capacity}) {
        const int64_t length = capacity + beyond;
        if (length > int64_t{1} << 40) continue;
        const std::optional<double> ratio = hdp::offload_ratio(p, length, 1);
        CHECK(ratio && *ratio > 0 && *ratio <= 1);
        const auto resident = [&](double r) {
          return static_cast<double>(length) * hdp::resident_share(p, r);
        };
        CHECK(resident(*ratio) <= static_cast<double>(capacity) * (1 + 1e-15));
        CHECK(resident(*ratio - 0x1p-31) > static_cast<double>(capacity));
      }
    }
  }
}

TEST(test_by_hand) {
  // 4 layers: 40 tokens with ratio 0.75 leave 40 x (2 + 0.25 x 2) / 4 = 25
  hdp::Problem p = problem(25, 1, 4, 100);
  CHECK(*hdp::offload_ratio(p, 40, 1) == 0.75);
  CHECK(hdp::resident_share(p, 0.75) == 0.625);
  CHECK(hdp::least_degree(p, 50) == 1);  // ratio 1: two of four layers
  CHECK(hdp::least_degree(p, 51) == 2);
  CHECK(*hdp::offload_ratio(p, 51, 3) == 0);
  // 15 of 40 tokens must reach the host within 40 / 3 s
  p.cost.host_bytes_per_s = 1.125;
  CHECK(hdp::offload_ratio(p, 40, 1).has_value());
  p.cost.host_bytes_per_s = 1.12;
  CHECK(!hdp::offload_ratio(p, 40, 1));
  CHECK(hdp::least_degree(p, 40) == 2);
  // what turns it off
  for (const auto turn_off : {+[](hdp::Problem& q) { q.offload = false; },
                              +[](hdp::Problem& q) { q.cost.activation_bytes_per_token = 0; },
                              +[](hdp::Problem& q) { q.cost.num_layers = 2; }}) {
    hdp::Problem off = problem(25, 1, 4, 100);
    turn_off(off);
    CHECK(!hdp::offload_ratio(off, 40, 1) && hdp::least_degree(off, 40) == 2);
  }
}

}  // namespace
