#include "planner/rings/node_ranks.hpp"

#include <algorithm>
#include <functional>

namespace hdp {

NodeRanks::NodeRanks(const std::vector<double>& clocks, const std::vector<bool>& keep,
                     int64_t ranks_per_node)
    : nodes_((clocks.size() - 1) / static_cast<std::size_t>(ranks_per_node) + 1) {
  for (std::size_t rank = 0; rank < clocks.size(); ++rank) {
    if (!keep[rank]) continue;
    const std::size_t node = rank / static_cast<std::size_t>(ranks_per_node);
    nodes_[node].emplace_back(clocks[rank], static_cast<int32_t>(rank));
  }
  for (std::vector<Free>& node : nodes_) std::sort(node.begin(), node.end());
}

void NodeRanks::push(std::size_t node) {
  heap_.emplace_back(nodes_[node][static_cast<std::size_t>(degree_ - 1)].first, node);
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
  auto end = static_cast<std::size_t>(degree);
  while (end < ranks.size() && ranks[end].first == start) ++end;
  // of those that are free exactly at the start the lower ones
  const auto tied = static_cast<std::size_t>(
      std::lower_bound(ranks.begin(), ranks.end(), Free{start, 0}) - ranks.begin());
  node_ = node;
  first_ = std::min(end - static_cast<std::size_t>(degree), tied);
  taken_.clear();
  for (std::size_t i = first_; i < first_ + static_cast<std::size_t>(degree); ++i) {
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
