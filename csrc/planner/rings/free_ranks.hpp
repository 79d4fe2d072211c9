// When ranks are free, to find those on which a ring can start first.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "planner/base/types.hpp"

namespace hdp {

// Grouped by when they are free: for wide rings.
class FreeRanks {
 public:
  // All ranks in the order in which they are preferred, free at time 0.
  explicit FreeRanks(std::vector<int32_t> preference);

  // Takes `degree` ranks, in order of preference, out of those that are free first. Of these the
  // ones that are free last, so that they wait least; of equals the preferred ones.
  std::vector<int32_t> take(int64_t degree);

  // Ranks that are free at the same time.
  struct Group {
    double clock = 0;
    std::vector<int32_t> ranks;  // in order of preference
  };

  // In no order that matters; valid until the next change.
  const std::vector<Group>& groups() const { return heap_; }

  // Takes the preferred `degree` ranks of a group.
  std::vector<int32_t> take_from(std::size_t group, int64_t degree);

  // Returns ranks (in order of preference) that are all free at `clock`.
  void give_back(std::vector<int32_t> ranks, double clock);

  // Forgets the ranks that `keep` is false for.
  void remove(const std::vector<bool>& keep);

 private:
  int32_t place(int32_t rank) const { return places_[index(rank)]; }
  bool later(const Group& left, const Group& right) const;
  auto order() const {
    return [this](const Group& left, const Group& right) { return later(left, right); };
  }
  Group pop();
  void push(Group group);
  // Moves the preferred ranks of a group, `most` at most, to `taken` and returns the others.
  void split(Group group, int64_t most, std::vector<int32_t>& taken);

  std::vector<int32_t> places_;  // in the order of preference, by rank
  std::vector<Group> heap_;
};

// Sorted within each node: for rings in one node.
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
