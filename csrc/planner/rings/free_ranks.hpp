// Ranks grouped by when they are free, to find the ranks of a wide ring that can start first.
#pragma once

#include <cstdint>
#include <vector>

namespace hdp {

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
  int32_t place(int32_t rank) const { return places_[static_cast<std::size_t>(rank)]; }
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

}  // namespace hdp
