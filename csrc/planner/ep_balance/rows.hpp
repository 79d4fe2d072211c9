// ep-balance: the sequences that one domain runs, dealt into slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "planner/base/place_set.hpp"
#include "planner/ep_balance/rank_groups.hpp"

namespace hdp {

// How long the ranks of a slot are to take.
struct Target {
  double height_s = 0;
  bool is_last = false;  // it takes all that is left
};

// A group that is being filled.
struct OpenGroup {
  int64_t first = 0;  // rank of the domain
  int64_t num_ranks = 0;
  double work_s = 0;      // that is missing
  double done_s = 0;      // work of its sequences
  int64_t tokens = 0;     // that have room
  double hidden_s = 0;    // attention beyond what hides the ring's traffic
  std::size_t begin = 0;  // in the draft's places
  std::size_t end = 0;
};

// Groups of a slot, if the ranks of each take the same time.
struct Draft {
  double longest_s = 0;
  double work_s = 0;
  double waste = 0;  // part of the slot's time
  std::vector<OpenGroup> groups;
  Places places;  // of one group after the other
};

// The sequences of one domain that wait for a slot. Each slot takes the longest that are
// left, as many as let all of its groups take the same time: those of few ranks have more short
// sequences, or less memory in use.
class SlotFiller {
 public:
  // `dense`: the problem without experts' time.
  SlotFiller(const Problem& dense, const Items& items);

  // With all items, which may be others than before.
  void start() { left_ = PlaceSet::all(items_.size()); }

  bool is_empty() const { return left_.next(0) == items_.size(); }

  // The greatest height to which the longest sequences left fill all ranks.
  Target target() const;

  // Other heights to try: those at which the longest sequence fills its ranks, then parts of the
  // one that was found.
  std::vector<double> heights(const Target& found) const;

  // Nothing is taken by that.
  void draft(const Target& target, Draft& draft);

  void take(std::size_t place) { left_.erase(place); }

 private:
  bool open(OpenGroup& group, const Target& target, Places& places);
  void fill(OpenGroup& group, const Target& target, Places& places);
  void level(Draft& draft);
  void add(OpenGroup& group, std::size_t place);
  bool is_whole(const Item& item) const { return item.tokens <= problem_.tokens_per_rank; }
  bool may_join(const OpenGroup& group, const Item& item) const;
  int64_t width_of(const Item& item, double height_s) const;
  double hidden_s(const Item& item, int64_t degree) const;
  std::size_t first_within(std::size_t place, double seconds, int64_t tokens) const;
  std::size_t next_length(std::size_t place) const;
  double size() const { return static_cast<double>(size_); }

  const Problem& problem_;
  const Items& items_;
  int64_t size_;
  int64_t group_size_;  // ranks whose ring hides the traffic of a sequence that fills one rank
  int64_t room_;        // of a rank for slices
  PlaceSet left_;
  // Of a slot that takes all that is left:
  std::vector<std::size_t> groups_;  // of the draft's places
  Places by_group_;
  std::vector<double> missing_s_;  // of each rank, by group
};

// Rows differ in time, the groups of a row do not: so time is lost only in the last groups' last
// gaps, which the shortest sequences fill. One stretch of one domain after the other: what this
// needs it allocates once.
class Rows {
 public:
  // `dense`: the problem without experts' time.
  Rows(const Problem& dense, const Items& items)
      : size_(static_cast<double>(dense.expert_ranks)),
        filler_(dense, items),
        sharing_(dense, items) {}

  // Deals all items, which may be others than before, on the domain that begins with this rank.
  void start(int32_t first) {
    first_ = first;
    filler_.start();
  }

  // The next row, or null where all items are dealt. Every item fits on all ranks together.
  const Row* next();

 private:
  void try_heights(const Target& found);
  void share(Draft& draft, Row& row, double most);
  double wasted(const Row& row) const;

  double size_;  // ranks of a domain
  int32_t first_ = 0;
  SlotFiller filler_;
  GroupSharing sharing_;
  Row best_;
  double least_waste_ = 0;
  // Of other heights:
  Row row_;
  std::vector<Draft> drafts_;
  std::vector<std::pair<double, std::size_t>> order_;  // (waste, draft)
};

// The micro-batches of a plan, made in any order.
class MicroBatches {
 public:
  // A ring at a position of all its ranks.
  void add(int32_t position, const std::vector<int32_t>& ranks,
           const std::vector<SequenceId>& sequences, double offload_ratio);

  // A sequence in the way in which it fits on these ranks, see add_sequence().
  void add_alone(int32_t position, const Problem& problem, const std::vector<int32_t>& ranks,
                 SequenceId sequence);

  // What the groups have placed.
  void add(int32_t position, const Row& row, const Items& items) {
    for (const RankGroup& group : row.groups) add(position, row, group, items);
  }

  // By position, those of a position in the order in which they were made.
  Plan sorted() const;

 private:
  void add(int32_t position, const Row& row, const RankGroup& group, const Items& items);

  Plan made_;
  // Of a group:
  std::vector<int32_t> ranks_;
  std::vector<SequenceId> sequences_;
  std::vector<SequenceId> locals_;  // by rank
  std::vector<int32_t> ends_;       // in locals_, of each rank
};

}  // namespace hdp
