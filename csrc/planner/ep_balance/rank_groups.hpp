// ep-balance: some neighbouring ranks at one slot, and how they share what they are given.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/types.hpp"

namespace hdp {

// A sequence without what experts compute: that is shared by the domain whoever owns the tokens.
struct Item {
  SequenceId id = 0;
  int64_t length = 0;
  int64_t tokens = 0;  // of one rank that has it whole, padding included
  double dense_s = 0;  // on one rank of speed 1
};

// Longest first.
using Items = std::vector<Item>;
using Places = std::vector<std::size_t>;  // in Items, ascending

// Of a sequence that is on no rank by itself: it is over all ranks of the group, or found no room.
constexpr int32_t kSharded = -1;
constexpr int32_t kLeft = -2;

struct RankGroup {
  int32_t first = 0;  // rank
  int64_t num_ranks = 1;
  std::size_t begin = 0;  // of what it is given, in the row's places
  std::size_t end = 0;
  double seconds = 0;  // of the slowest rank
  double dense_s = 0;  // of all that is placed
};

// What the ranks of a domain run at one slot.
struct Row {
  std::vector<RankGroup> groups;
  Places places;                // of one group after the other
  std::vector<int32_t> owners;  // of each place: a rank of its group, from 0 on, kSharded or kLeft
};

// Shares groups out, one after the other; what it needs for that it allocates once.
class GroupSharing {
 public:
  // `dense`: the problem without experts' time.
  GroupSharing(const Problem& dense, const Items& items) : problem_(dense), items_(items) {}

  // Decides the owners of what the group is given, and its time. The longest are sharded over all
  // ranks, the others placed whole, longest first, each on the least loaded rank that has room. So
  // many are sharded as lose least: with more the ranks' times are more alike, but traffic may be
  // exposed. A group that has placed all within `enough_s` is good enough.
  void share(Row& row, RankGroup& group, double enough_s);

 private:
  struct Ring {
    int64_t slice = 0;  // tokens on each rank
    double tokens = 0;
    double attention_s = 0;
    double dense_s = 0;
    bool is_empty = true;
  };

  bool draft(const RankGroup& group, std::size_t num_sharded, double limit_s);
  Ring ring_of(const RankGroup& group, std::size_t num_sharded);
  void start(const RankGroup& group, const Ring& ring);

  const Problem& problem_;
  const Items& items_;
  const std::size_t* given_ = nullptr;  // places of the group
  // Of a draft:
  std::vector<int32_t> owners_;
  std::vector<double> loads_;
  std::vector<int64_t> rooms_;
  double seconds_ = 0;
  double dense_s_ = 0;
  bool has_left_ = false;
};

// Tokens that a rank can hold of sharded sequences, padding included.
int64_t ring_room(const Problem& problem);

}  // namespace hdp
