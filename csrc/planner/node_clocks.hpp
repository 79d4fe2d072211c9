// When each rank is free, kept sorted within each node, to find the ring that can start first.
#pragma once

#include <cstdint>
#include <vector>

namespace hdp {

class NodeClocks {
 public:
  NodeClocks(int64_t num_ranks, int64_t ranks_per_node);

  // `degree` ranks that are free earliest, ascending: of one node if a node has that many ranks.
  // Of equals the lower node, then the lower rank.
  std::vector<int32_t> earliest(int64_t degree) const;

  double at(int32_t rank) const { return clocks_[static_cast<std::size_t>(rank)]; }

  void set(const std::vector<int32_t>& ranks, double clock);

  const std::vector<double>& all() const { return clocks_; }

 private:
  bool before(int32_t left, int32_t right) const;
  int64_t node_end(int64_t node) const;
  void sort_node(int64_t node);
  std::vector<int32_t> earliest_in_a_node(int64_t degree) const;
  std::vector<int32_t> earliest_anywhere(int64_t degree) const;

  int64_t ranks_per_node_;
  int64_t num_nodes_;
  std::vector<double> clocks_;   // by rank
  std::vector<int32_t> sorted_;  // node after node, the earliest rank first
};

}  // namespace hdp
