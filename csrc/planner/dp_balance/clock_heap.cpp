#include "planner/dp_balance/clock_heap.hpp"

#include <algorithm>
#include <functional>

namespace hdp {
namespace {

using Entry = std::pair<double, int32_t>;

// As operator<, without a branch: which child is earlier cannot be predicted.
bool earlier(const Entry& left, const Entry& right) {
  return (left.first < right.first) |
         ((left.first == right.first) & (left.second < right.second));
}

}  // namespace

ClockHeap::ClockHeap(const std::vector<double>& clocks) {
  entries_.reserve(clocks.size());
  for (const double clock : clocks) {
    entries_.emplace_back(clock, static_cast<int32_t>(entries_.size()));
  }
  std::make_heap(entries_.begin(), entries_.end(), std::greater<>());
}

void ClockHeap::advance(std::size_t place, double clock) {
  const Entry moved{clock, entries_[place].second};
  for (;;) {
    std::size_t child = 2 * place + 1;
    if (child >= entries_.size()) break;
    if (child + 1 < entries_.size()) child += earlier(entries_[child + 1], entries_[child]) ? 1 : 0;
    if (!earlier(entries_[child], moved)) break;
    entries_[place] = entries_[child];
    place = child;
  }
  entries_[place] = moved;
}

}  // namespace hdp
