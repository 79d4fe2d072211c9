#include "planner/base/sorting.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

namespace hdp {
namespace {

constexpr int kDigitBits = 11;
constexpr std::size_t kNumDigits = std::size_t{1} << kDigitBits;

using Entries = std::vector<std::pair<int64_t, int64_t>>;  // (length, id)

// One stable pass of a radix sort, the greatest digit first.
void sort_by_digit(int shift, const Entries& entries, Entries& sorted) {
  const auto digit_of = [&](const std::pair<int64_t, int64_t>& entry) {
    const auto bits = static_cast<uint64_t>(entry.first) >> shift;
    return kNumDigits - 1 - (bits & (kNumDigits - 1));
  };
  std::array<std::size_t, kNumDigits + 1> starts{};
  for (const auto& entry : entries) ++starts[digit_of(entry) + 1];
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  for (const auto& entry : entries) sorted[starts[digit_of(entry)]++] = entry;
}

}  // namespace

std::vector<int64_t> longest_first(const std::vector<int64_t>& lengths) {
  Entries entries;
  entries.reserve(lengths.size());
  for (const int64_t length : lengths) {
    entries.emplace_back(length, static_cast<int64_t>(entries.size()));
  }
  if (entries.size() < kNumDigits) {
    std::stable_sort(entries.begin(), entries.end(),
                     [](const auto& left, const auto& right) { return left.first > right.first; });
  } else {
    Entries sorted(entries.size());
    const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
    for (int shift = 0; shift < 63 && (longest >> shift) > 0; shift += kDigitBits) {
      sort_by_digit(shift, entries, sorted);
      entries.swap(sorted);
    }
  }
  std::vector<int64_t> ids;
  ids.reserve(entries.size());
  for (const auto& entry : entries) ids.push_back(entry.second);
  return ids;
}

}  // namespace hdp
