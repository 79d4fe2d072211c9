#include "planner/dp_balance/clock_heap.hpp"

#include <algorithm>
#include <functional>

namespace hdp {
namespace {

using Entry = std::pair<double, int32_t>;

// Up to so many entries lie near enough in the cache for nothing to be gained by a guess which
// child is earlier, which has the next ones fetched.
constexpr std::size_t kNear = 4096;

// As operator<, without a branch: which child is earlier cannot be predicted.
bool earlier(const Entry& left, const Entry& right) {
  return (left.first < right.first) |
         ((left.first == right.first) & (left.second < right.second));
}

// Moves the entry at a place down; of two children `before` says which is earlier.
template <typename Before>
void sink(std::vector<Entry>& entries, std::size_t place, const Entry& moved,
          Before before) {
  for (;;) {
    std::size_t child = 2 * place + 1;
    if (child >= entries.size()) break;
    if (child + 1 < entries.size()) child += before(entries[child + 1], entries[child]) ? 1 : 0;
    if (!before(entries[child], moved)) break;
    entries[place] = entries[child];
    place = child;
  }
  entries[place] = moved;
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
  if (entries_.size() <= kNear) {
    sink(entries_, place, moved, earlier);
  } else {
    sink(entries_, place, moved, std::less<>());
  }
}

std::pair<double, int32_t> ClockHeap::pop() {
  std::pop_heap(entries_.begin(), entries_.end(), std::greater<>());
  const Entry earliest = entries_.back();
  entries_.pop_back();
  return earliest;
}

void ClockHeap::push(const std::pair<double, int32_t>& entry) {
  entries_.push_back(entry);
  std::push_heap(entries_.begin(), entries_.end(), std::greater<>());
}

}  // namespace hdp
