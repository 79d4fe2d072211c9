#include "planner/base/sorting.hpp"

#include <algorithm>
#include <array>
#include <numeric>

namespace hdp {
namespace {

constexpr int kDigitBits = 11;
constexpr std::size_t kNumDigits = std::size_t{1} << kDigitBits;

// One stable pass of a radix sort of ids by their lengths, the greatest digit first.
void sort_by_digit(const std::vector<int64_t>& lengths, int shift, const std::vector<int64_t>& ids,
                   std::vector<int64_t>& sorted) {
  const auto digit_of = [&](int64_t id) {
    const auto bits = static_cast<uint64_t>(lengths[static_cast<std::size_t>(id)]) >> shift;
    return kNumDigits - 1 - (bits & (kNumDigits - 1));
  };
  std::array<std::size_t, kNumDigits + 1> starts{};
  for (const int64_t id : ids) ++starts[digit_of(id) + 1];
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  for (const int64_t id : ids) sorted[starts[digit_of(id)]++] = id;
}

}  // namespace

std::vector<int64_t> longest_first(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> ids(lengths.size());
  std::iota(ids.begin(), ids.end(), int64_t{0});
  if (ids.size() < kNumDigits) {
    std::stable_sort(ids.begin(), ids.end(), [&](int64_t left, int64_t right) {
      return lengths[static_cast<std::size_t>(left)] > lengths[static_cast<std::size_t>(right)];
    });
    return ids;
  }
  std::vector<int64_t> sorted(ids.size());
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  for (int shift = 0; shift < 63 && (longest >> shift) > 0; shift += kDigitBits) {
    sort_by_digit(lengths, shift, ids, sorted);
    ids.swap(sorted);
  }
  return ids;
}

}  // namespace hdp
