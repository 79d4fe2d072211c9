// The ranks ordered by when they are free: a binary heap whose clocks only grow.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace hdp {

class ClockHeap {
 public:
  explicit ClockHeap(const std::vector<double>& clocks);

  std::size_t size() const { return entries_.size(); }
  int32_t rank(std::size_t place) const { return entries_[place].second; }
  double clock(std::size_t place) const { return entries_[place].first; }

  // Moves the clock at a place (0 is the earliest; of equals the lower rank) to a later time.
  void advance(std::size_t place, double clock);

  // Looks at the earliest entry, takes it out, and puts one back.
  const std::pair<double, int32_t>& earliest() const { return entries_.front(); }
  std::pair<double, int32_t> pop();
  void push(const std::pair<double, int32_t>& entry);

 private:
  std::vector<std::pair<double, int32_t>> entries_;  // (clock, rank)
};

}  // namespace hdp
