// Unit tests of data/mixing.hpp.
#include "data/mixing.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <vector>

#include "tests/checking.hpp"

namespace {

constexpr int64_t kNoBound = int64_t{1} << 60;

// Sources that hold `count` sequences of their own length each.
struct Sources {
  std::vector<int64_t> lengths;
  hdp::Ready ready;

  Sources(const std::vector<int64_t>& of_source, int64_t count) {
    ready.first.push_back(0);
    for (const int64_t length : of_source) {
      lengths.insert(lengths.end(), static_cast<size_t>(count), length);
      ready.first.push_back(static_cast<int64_t>(lengths.size()));
    }
    ready.used.assign(of_source.size(), 0);
    ready.lengths = ready.amounts = lengths.data();
  }
};

TEST(test_turns) {
  Sources sources({10, 10, 30}, 100);
  std::vector<double> owed(3, 0.0);
  const hdp::Mixed mixed = hdp::mix({0.25, 0.25, 0.5}, owed, sources.ready, {8, kNoBound, true});
  // 10 of 40, 10 of 40 and 30 of 60 fall due in this order; ties go to the first
  CHECK((mixed.sources == std::vector<int32_t>{0, 1, 2, 0, 1, 2, 0, 1}));
  CHECK((mixed.turns == std::vector<int64_t>{0, 0, 0, 1, 1, 1, 2, 2}));
  CHECK(mixed.source == -1);
  CHECK(std::abs(std::accumulate(owed.begin(), owed.end(), 0.0)) < 1e-9);
}

TEST(test_the_room) {
  Sources sources({10, 7}, 100);
  std::vector<double> owed(2, 0.0);
  const hdp::Mixed first = hdp::mix({1.0, 0.0}, owed, sources.ready, {5, 25, true});
  CHECK((first.sources == std::vector<int32_t>{0, 0}));
  const hdp::Mixed none = hdp::mix({1.0, 0.0}, owed, sources.ready, {5, 5, false});
  CHECK(none.sources.empty() && none.source == -1);
  const hdp::Mixed one = hdp::mix({1.0, 0.0}, owed, sources.ready, {5, 5, true});
  CHECK((one.sources == std::vector<int32_t>{0}));
  CHECK((sources.ready.used == std::vector<int64_t>{3, 0}));
}

TEST(test_a_source_with_nothing_ready) {
  Sources sources({10, 10}, 2);
  std::vector<double> owed(2, 0.0);
  const hdp::Mixed mixed = hdp::mix({0.5, 0.5}, owed, sources.ready, {9, kNoBound, true});
  CHECK((mixed.sources == std::vector<int32_t>{0, 1, 0, 1}));
  CHECK(mixed.source == 0);
  CHECK((owed == std::vector<double>{0.0, 0.0}));
}

// Whose turn it is, as mixing.hpp has it, one source after the other.
size_t turn_by_hand(const std::vector<double>& weights, const std::vector<double>& owed,
                    const std::vector<double>& amounts) {
  const double least = std::min(0.0, *std::max_element(owed.begin(), owed.end()));
  size_t turn = weights.size();
  double first_due = 0.0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (owed[i] < least) continue;
    const double due = (amounts[i] - owed[i]) / weights[i];
    if (turn == weights.size() || due < first_due) turn = i, first_due = due;
  }
  return turn;
}

TEST(test_turns_of_any_number_of_sources) {
  for (size_t count = 1; count <= 19; ++count) {
    std::vector<int64_t> lengths;
    std::vector<double> weights, amounts;
    for (size_t i = 0; i < count; ++i) {
      lengths.push_back(static_cast<int64_t>(1 + (i * 7) % 5));
      amounts.push_back(static_cast<double>(lengths.back()));
      weights.push_back(static_cast<double>(1 + i % 3) / static_cast<double>(count));
    }
    Sources sources(lengths, 300);
    std::vector<double> owed(count, -1e-12), expected_owed = owed;  // all ahead, by rounding
    const hdp::Mixed mixed = hdp::mix(weights, owed, sources.ready, {200, kNoBound, true});
    std::vector<int64_t> used(count, 0);
    CHECK(mixed.sources.size() == 200);
    for (size_t n = 0; n < mixed.sources.size(); ++n) {
      const size_t turn = turn_by_hand(weights, expected_owed, amounts);
      CHECK(mixed.sources[n] == static_cast<int32_t>(turn) && mixed.turns[n] == used[turn]++);
      for (size_t i = 0; i < count; ++i) expected_owed[i] += weights[i] * amounts[turn];
      expected_owed[turn] -= amounts[turn];
    }
    CHECK(owed == expected_owed && sources.ready.used == used);
  }
}

bool refuses(const std::vector<double>& weights, std::vector<double> owed, hdp::Ready ready) {
  return hdp_tests::is_refused([&] { hdp::mix(weights, owed, ready, {1, kNoBound, true}); });
}

TEST(test_refusals) {
  const Sources sources({10, 10}, 2);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK(!refuses({0.5, 0.5}, {0, 0}, sources.ready));
  CHECK(refuses({0.5}, {0, 0}, sources.ready));
  CHECK(refuses({0.5, 0.5}, {0}, sources.ready));
  CHECK(refuses({0.0, 0.0}, {0, 0}, sources.ready));
  CHECK(refuses({-1.0, 0.5}, {0, 0}, sources.ready));
  CHECK(refuses({nan, 0.5}, {0, 0}, sources.ready));
  CHECK(refuses({0.5, 0.5}, {0, nan}, sources.ready));
  hdp::Ready used = sources.ready;
  used.used = {0, 3};
  CHECK(refuses({0.5, 0.5}, {0, 0}, used));
  const Sources empty({0, 10}, 2);
  CHECK(refuses({0.5, 0.5}, {0, 0}, empty.ready));
}

}  // namespace
