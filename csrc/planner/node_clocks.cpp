#include "planner/node_clocks.hpp"

#include <algorithm>
#include <numeric>

namespace hdp {

NodeClocks::NodeClocks(int64_t num_ranks, int64_t ranks_per_node)
    : ranks_per_node_(std::min(ranks_per_node, num_ranks)),
      num_nodes_((num_ranks + ranks_per_node_ - 1) / ranks_per_node_),
      clocks_(static_cast<std::size_t>(num_ranks), 0.0),
      sorted_(static_cast<std::size_t>(num_ranks)) {
  std::iota(sorted_.begin(), sorted_.end(), 0);
}

bool NodeClocks::before(int32_t left, int32_t right) const {
  return at(left) != at(right) ? at(left) < at(right) : left < right;
}

int64_t NodeClocks::node_end(int64_t node) const {
  return std::min<int64_t>((node + 1) * ranks_per_node_, static_cast<int64_t>(clocks_.size()));
}

void NodeClocks::sort_node(int64_t node) {
  std::sort(sorted_.begin() + node * ranks_per_node_, sorted_.begin() + node_end(node),
            [&](int32_t left, int32_t right) { return before(left, right); });
}

std::vector<int32_t> NodeClocks::earliest(int64_t degree) const {
  std::vector<int32_t> ranks =
      degree <= ranks_per_node_ ? earliest_in_a_node(degree) : earliest_anywhere(degree);
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

std::vector<int32_t> NodeClocks::earliest_in_a_node(int64_t degree) const {
  int64_t best = 0;  // only the last node may be too small, so the first one always serves
  double best_start = 0;
  for (int64_t node = 0; node < num_nodes_; ++node) {
    const int64_t last = node * ranks_per_node_ + degree - 1;
    if (last >= node_end(node)) continue;
    const double start = at(sorted_[static_cast<std::size_t>(last)]);
    if (node == 0 || start < best_start) {
      best = node;
      best_start = start;
    }
  }
  const auto first = sorted_.begin() + best * ranks_per_node_;
  return {first, first + degree};
}

std::vector<int32_t> NodeClocks::earliest_anywhere(int64_t degree) const {
  std::vector<int32_t> ranks = sorted_;
  const auto end = ranks.begin() + degree;
  std::nth_element(ranks.begin(), end - 1, ranks.end(),
                   [&](int32_t left, int32_t right) { return before(left, right); });
  ranks.erase(end, ranks.end());
  return ranks;
}

void NodeClocks::set(const std::vector<int32_t>& ranks, double clock) {
  for (const int32_t rank : ranks) clocks_[static_cast<std::size_t>(rank)] = clock;
  int64_t sorted_node = -1;
  for (const int32_t rank : ranks) {
    const int64_t node = rank / ranks_per_node_;
    if (node != sorted_node) sort_node(node);
    sorted_node = node;
  }
}

}  // namespace hdp
