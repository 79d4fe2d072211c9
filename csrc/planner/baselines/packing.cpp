#include "planner/baselines/packing.hpp"

#include <algorithm>
#include <functional>

namespace hdp {

namespace {

void push(int32_t bin, std::vector<int32_t>& bins) {
  bins.push_back(bin);
  std::push_heap(bins.begin(), bins.end(), std::greater<>());
}

int32_t pop(std::vector<int32_t>& bins) {
  std::pop_heap(bins.begin(), bins.end(), std::greater<>());
  const int32_t bin = bins.back();
  bins.pop_back();
  return bin;
}

}  // namespace

int64_t BestFit::place(int64_t tokens) {
  const auto found = open_.lower_bound(tokens);
  if (found == open_.end()) {
    if (capacity_ > tokens) push(num_bins_, open_[capacity_ - tokens]);
    return num_bins_++;
  }
  const int32_t bin = pop(found->second);
  const int64_t room = found->first - tokens;
  if (!found->second.empty()) {
    if (room > 0) push(bin, open_[room]);
    return bin;
  }
  auto entry = open_.extract(found);  // its memory serves again
  if (room > 0) {
    entry.key() = room;
    push(bin, open_.insert(std::move(entry)).position->second);
  }
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
  } else if (entry.first >= least_) {
    asleep_.push_back(entry);
    std::push_heap(asleep_.begin(), asleep_.end());
  }
  return entry.second;
}

void Packed::add(int64_t bin) {
  if (bin == num_bins()) places_.push_back(0);
  ++places_[index(bin)];
  bins_.push_back(static_cast<int32_t>(bin));
}

void Packed::open(int64_t bin, const std::vector<int32_t>& ring, Plan& plan) {
  int32_t& place = places_[index(bin)];
  const int32_t num_items = place;
  place = static_cast<int32_t>(plan.sequences.size());
  plan.add_room(ring, num_items);
}

void Packed::put(SequenceId id, Plan& plan) {
  int32_t& place = places_[index(bins_[next_++])];
  plan.sequences[index(place++)] = id;
}

}  // namespace hdp
