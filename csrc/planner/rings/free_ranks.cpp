#include "planner/rings/free_ranks.hpp"

#include <algorithm>
#include <functional>
#include <utility>

namespace hdp {

FreeRanks::FreeRanks(std::vector<int32_t> preference) : places_(preference.size()) {
  for (std::size_t place = 0; place < preference.size(); ++place) {
    places_[index(preference[place])] = static_cast<int32_t>(place);
  }
  push({0, std::move(preference)});
}

bool FreeRanks::later(const Group& left, const Group& right) const {
  if (left.clock != right.clock) return left.clock > right.clock;
  return place(left.ranks.front()) > place(right.ranks.front());
}

FreeRanks::Group FreeRanks::pop() {
  std::pop_heap(heap_.begin(), heap_.end(), order());
  Group group = std::move(heap_.back());
  heap_.pop_back();
  return group;
}

void FreeRanks::push(Group group) {
  if (group.ranks.empty()) return;
  heap_.push_back(std::move(group));
  std::push_heap(heap_.begin(), heap_.end(), order());
}

void FreeRanks::split(Group group, int64_t most, std::vector<int32_t>& taken) {
  const auto size = static_cast<int64_t>(group.ranks.size());
  const auto end = group.ranks.begin() + std::min(most, size);
  taken.insert(taken.end(), group.ranks.begin(), end);
  group.ranks.erase(group.ranks.begin(), end);
  push(std::move(group));
}

std::vector<int32_t> FreeRanks::take(int64_t degree) {
  std::vector<Group> first;
  int64_t missing = degree;
  int64_t latest = 0;  // ranks of `first` that are free last
  const auto more_of_the_latest = [&] {
    return latest < degree && !heap_.empty() && heap_.front().clock == first.back().clock;
  };
  while (missing > 0 || more_of_the_latest()) {
    const bool is_later = first.empty() || heap_.front().clock > first.back().clock;
    first.push_back(pop());
    const auto size = static_cast<int64_t>(first.back().ranks.size());
    missing -= size;
    latest = is_later ? size : latest + size;
  }
  // the groups that start together with the ring come first, in order; then backwards in time
  std::stable_sort(first.begin(), first.end(),
                   [](const Group& left, const Group& right) { return left.clock > right.clock; });
  std::vector<int32_t> taken;
  for (Group& group : first) {
    split(std::move(group), degree - static_cast<int64_t>(taken.size()), taken);
  }
  const auto preferred = [&](int32_t left, int32_t right) { return place(left) < place(right); };
  if (!std::is_sorted(taken.begin(), taken.end(), preferred)) {
    std::sort(taken.begin(), taken.end(), preferred);
  }
  return taken;
}

std::vector<int32_t> FreeRanks::take_from(std::size_t group, int64_t degree) {
  std::swap(heap_[group], heap_.back());
  Group taken_from = std::move(heap_.back());
  heap_.pop_back();
  std::make_heap(heap_.begin(), heap_.end(), order());
  std::vector<int32_t> taken;
  split(std::move(taken_from), degree, taken);
  return taken;
}

void FreeRanks::give_back(std::vector<int32_t> ranks, double clock) {
  push({clock, std::move(ranks)});
}

void FreeRanks::remove(const std::vector<bool>& keep) {
  std::vector<Group> groups = std::move(heap_);
  heap_.clear();
  for (Group& group : groups) {
    group.ranks.erase(std::remove_if(group.ranks.begin(), group.ranks.end(),
                                     [&](int32_t rank) { return !keep[index(rank)]; }),
                      group.ranks.end());
    push(std::move(group));
  }
}

NodeRanks::NodeRanks(const std::vector<double>& clocks, const std::vector<bool>& keep,
                     int64_t ranks_per_node)
    : nodes_((clocks.size() - 1) / index(ranks_per_node) + 1) {
  for (std::size_t rank = 0; rank < clocks.size(); ++rank) {
    if (!keep[rank]) continue;
    const std::size_t node = rank / index(ranks_per_node);
    nodes_[node].emplace_back(clocks[rank], static_cast<int32_t>(rank));
  }
  for (std::vector<Free>& node : nodes_) std::sort(node.begin(), node.end());
}

void NodeRanks::push(std::size_t node) {
  heap_.emplace_back(nodes_[node][index(degree_ - 1)].first, node);
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
}

const std::vector<int32_t>& NodeRanks::take(int64_t degree) {
  if (degree != degree_) {
    degree_ = degree;
    heap_.clear();
    for (std::size_t node = 0; node < nodes_.size(); ++node) {
      if (static_cast<int64_t>(nodes_[node].size()) >= degree) push(node);
    }
  }
  std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
  const auto [start, node] = heap_.back();
  heap_.pop_back();
  const std::vector<Free>& ranks = nodes_[node];
  auto end = index(degree);
  while (end < ranks.size() && ranks[end].first == start) ++end;
  // of those that are free exactly at the start the lower ones
  const auto tied =
      index(std::lower_bound(ranks.begin(), ranks.end(), Free{start, 0}) - ranks.begin());
  node_ = node;
  first_ = std::min(end - index(degree), tied);
  taken_.clear();
  for (std::size_t i = first_; i < first_ + index(degree); ++i) {
    taken_.push_back(ranks[i].second);
  }
  std::sort(taken_.begin(), taken_.end());
  return taken_;
}

void NodeRanks::give_back(double clock) {
  std::vector<Free>& ranks = nodes_[node_];
  const std::size_t last = first_ + taken_.size();
  for (std::size_t i = first_; i < last; ++i) ranks[i] = {clock, taken_[i - first_]};
  if (last < ranks.size() && ranks[last] < ranks[last - 1]) std::sort(ranks.begin(), ranks.end());
  push(node_);
}

}  // namespace hdp
