#include "planner/baselines/packing.hpp"

#include <algorithm>
#include <functional>

namespace hdp {

int64_t BestFit::place(int64_t tokens) {
  const auto found = open_.lower_bound({tokens, -1});
  if (found == open_.end()) {
    if (capacity_ > tokens) open_.emplace(capacity_ - tokens, num_bins_);
    return num_bins_++;
  }
  auto entry = open_.extract(found);
  const int64_t bin = entry.value().second;
  entry.value().first -= tokens;
  if (entry.value().first > 0) open_.insert(std::move(entry));
  return bin;
}

int64_t BestFitDecreasing::place(int64_t tokens) {
  while (!asleep_.empty() && asleep_.front().first >= tokens) {
    std::pop_heap(asleep_.begin(), asleep_.end());
    awake_.push_back(asleep_.back());
    std::push_heap(awake_.begin(), awake_.end(), std::greater<>());
    asleep_.pop_back();
  }
  Entry entry{capacity_, num_bins_};
  if (awake_.empty()) {
    ++num_bins_;
  } else {
    std::pop_heap(awake_.begin(), awake_.end(), std::greater<>());
    entry = awake_.back();
    awake_.pop_back();
  }
  entry.first -= tokens;
  if (entry.first >= tokens) {
    awake_.push_back(entry);
    std::push_heap(awake_.begin(), awake_.end(), std::greater<>());
  } else if (entry.first > 0) {
    asleep_.push_back(entry);
    std::push_heap(asleep_.begin(), asleep_.end());
  }
  return entry.second;
}

void Packed::add(int64_t bin) {
  if (bin == num_bins()) sizes_.push_back(0);
  ++sizes_[static_cast<std::size_t>(bin)];
  bins_.push_back(static_cast<int32_t>(bin));
}

void Packed::open(int64_t bin, const std::vector<int32_t>& ring, Plan& plan) {
  ends_.resize(sizes_.size());
  ends_[static_cast<std::size_t>(bin)] = static_cast<int64_t>(plan.sequences.size());
  plan.add_room(ring, sizes_[static_cast<std::size_t>(bin)]);
}

void Packed::put(int64_t id, Plan& plan) {
  int64_t& end = ends_[static_cast<std::size_t>(bins_[next_++])];
  plan.sequences[static_cast<std::size_t>(end++)] = id;
}

}  // namespace hdp
