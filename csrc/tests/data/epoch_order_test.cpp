// Unit tests of data/epoch_order.hpp.
#include "data/epoch_order.hpp"

#include <limits>
#include <numeric>
#include <vector>

#include "tests/checking.hpp"

namespace {

bool is_permutation(const std::vector<int64_t>& rows) {
  std::vector<bool> seen(rows.size());
  for (const int64_t row : rows) {
    if (row < 0 || row >= static_cast<int64_t>(rows.size())) return false;
    if (seen[static_cast<size_t>(row)]) return false;
    seen[static_cast<size_t>(row)] = true;
  }
  return true;
}

TEST(test_every_row_once) {
  CHECK(!is_permutation({0, 2}) && !is_permutation({0, 0}));
  for (int64_t num_rows = 1; num_rows <= 1100; ++num_rows) {
    for (const uint64_t seed : {uint64_t{0}, std::numeric_limits<uint64_t>::max()}) {
      CHECK(is_permutation(hdp::EpochOrder(num_rows, seed, 0, 1).rows(0, num_rows)));
    }
  }
}

TEST(test_random_access) {
  const hdp::EpochOrder order(1000, 1, 2, 3);
  const std::vector<int64_t> all = order.rows(0, 1000);
  CHECK(order.rows(1000, 0).empty());
  CHECK(order.rows(600, 400) == std::vector<int64_t>(all.begin() + 600, all.end()));
  for (int64_t position = 0; position < 1000; position += 37) {
    CHECK(order.row(position) == all[static_cast<size_t>(position)]);
  }
}

TEST(test_every_word_matters) {
  const std::vector<int64_t> rows = hdp::EpochOrder(1000, 1, 2, 3).rows(0, 1000);
  CHECK(rows == hdp::EpochOrder(1000, 1, 2, 3).rows(0, 1000));
  CHECK(rows != hdp::EpochOrder(1000, 2, 1, 3).rows(0, 1000));
  CHECK(rows != hdp::EpochOrder(1000, 1, 3, 2).rows(0, 1000));
  CHECK(rows != hdp::EpochOrder(1000, 0, 2, 3).rows(0, 1000));
}

TEST(test_the_largest_epoch) {
  const int64_t last = hdp::EpochOrder::kMaxRows - 1;
  const hdp::EpochOrder order(hdp::EpochOrder::kMaxRows, 5, 0, 0);
  for (const int64_t position : {int64_t{0}, last / 3, last}) {
    CHECK(order.row(position) >= 0 && order.row(position) <= last);
  }
}

TEST(test_refusals) {
  CHECK(hdp_tests::is_refused([] { hdp::EpochOrder(0, 0, 0, 0); }));
  CHECK(hdp_tests::is_refused([] { hdp::EpochOrder(hdp::EpochOrder::kMaxRows + 1, 0, 0, 0); }));
  const hdp::EpochOrder order(10, 0, 0, 0);
  constexpr int64_t most = std::numeric_limits<int64_t>::max();
  CHECK(hdp_tests::is_refused([&] { order.rows(-1, 2); }));
  CHECK(hdp_tests::is_refused([&] { order.rows(3, -1); }));
  CHECK(hdp_tests::is_refused([&] { order.rows(3, 8); }));
  CHECK(hdp_tests::is_refused([&] { order.rows(11, 0); }));
  CHECK(hdp_tests::is_refused([&] { order.rows(most, most); }));
}

}  // namespace

int main() { return hdp_tests::run_tests(); }
