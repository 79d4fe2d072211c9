#include "planner/base/sorting.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

namespace hdp {
namespace {

constexpr int kDigitBits = 11;
constexpr std::size_t kNumDigits = std::size_t{1} << kDigitBits;

// One stable pass of a radix sort of ids by their lengths, the greatest digit first.
void sort_by_digit(const Lengths& lengths, int shift, const std::vector<SequenceId>& ids,
                   std::vector<SequenceId>& sorted) {
  const auto digit_of = [&](SequenceId id) {
    const auto bits = static_cast<uint64_t>(lengths[index(id)]) >> shift;
    return kNumDigits - 1 - (bits & (kNumDigits - 1));
  };
  std::array<std::size_t, kNumDigits + 1> starts{};
  for (const SequenceId id : ids) ++starts[digit_of(id) + 1];
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  for (const SequenceId id : ids) sorted[starts[digit_of(id)]++] = id;
}

}  // namespace

std::vector<SequenceId> longest_first(const Lengths& lengths) {
  std::vector<SequenceId> ids(lengths.size());
  std::iota(ids.begin(), ids.end(), SequenceId{0});
  if (ids.size() < kNumDigits) {
    std::stable_sort(ids.begin(), ids.end(), [&](SequenceId left, SequenceId right) {
      return lengths[index(left)] > lengths[index(right)];
    });
    return ids;
  }
  std::vector<SequenceId> sorted(ids.size());
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  for (int shift = 0; shift < 63 && (longest >> shift) > 0; shift += kDigitBits) {
    sort_by_digit(lengths, shift, ids, sorted);
    ids.swap(sorted);
  }
  return ids;
}

SortedLengths::SortedLengths(const Lengths& lengths, const std::vector<SequenceId>& order) {
  const auto gather = [&](auto& values) {
    using Value = typename std::decay_t<decltype(values)>::value_type;
    values.reserve(order.size());
    for (const SequenceId id : order) {
      values.push_back(static_cast<Value>(lengths[index(id)]));
    }
  };
  if (order.empty()) return;
  const bool fits = lengths[index(order.front())] <= std::numeric_limits<uint32_t>::max();
  fits ? gather(short_) : gather(long_);
}

std::size_t SortedLengths::first_within(int64_t limit) const {
  std::size_t low = 0;
  std::size_t high = size();
  while (low < high) {
    const std::size_t middle = low + (high - low) / 2;
    if ((*this)[middle] > limit) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace hdp
