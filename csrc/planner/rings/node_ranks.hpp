// When each rank is free, sorted within each node, to find the node where a ring can start first.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace hdp {

class NodeRanks {
 public:
  // The ranks that `keep` is true for, free at `clocks`.
  NodeRanks(const std::vector<double>& clocks, const std::vector<bool>& keep,
            int64_t ranks_per_node);

  // `degree` ranks of one node, ascending: of the node that has so many first (of equals the
  // lower one), those that wait least; valid until the next call. Degrees must not grow from call
  // to call.
  const std::vector<int32_t>& take(int64_t degree);

  // Returns the ranks taken last, which are all free at `clock`.
  void give_back(double clock);

 private:
  using Free = std::pair<double, int32_t>;       // (clock, rank)
  using First = std::pair<double, std::size_t>;  // (when a node has `degree_` ranks, node)

  void push(std::size_t node);

  std::vector<std::vector<Free>> nodes_;  // each sorted
  std::vector<First> heap_;               // of the nodes with at least degree_ ranks
  int64_t degree_ = 0;
  std::vector<int32_t> taken_;  // last
  std::size_t node_ = 0;        // theirs
  std::size_t first_ = 0;       // their first place in the node
};

}  // namespace hdp
