// Dynamic context parallelism of Megatron-LM's dev branch (--sequence-packing-scheduler
// default_dynamic_cp), as the baseline to compare with.
//
// The batch is cut into rounds, and in each round every rank runs one micro-batch. A round deals
// what is left of the batch, longest first, to groups of a power of two of ranks, formed one behind
// the other. A sequence may join a group of any degree at which its slice fits, or form one where
// ranks are left; it goes where the most work of a rank stays least, which is the sum of squares of
// the lengths over the degree. Of equal places it takes the least degree, there the oldest group,
// and forms a new one last. Only the first of a round takes the least degree in any case. Ranks
// left over widen the groups of the least degree to twice their ranks, oldest first; where that
// does not come out even (N is no power of two), all ranks form one group.
//
// Places that differ from the original, chosen here:
//
// - There every sequence comes padded to a multiple of 2N tokens, so that any degree cuts it
//   evenly. Here a slice is padded at the degree that it has, which asks for less room.
// - Where N is no power of two and widening would push a group beyond the last rank, the original
//   stops with an index out of range. Here all ranks form one group.
// - The original also limits a rank's work to 1.05 C times the longest of the round. No packing
//   within the capacity exceeds C times that, so the limit is left out.
// - Speeds, stages, offload and the cost model play no part, as there.
#include <algorithm>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "planner/base/place_set.hpp"
#include "planner/base/slices.hpp"
#include "planner/base/sorting.hpp"
#include "planner/baselines/baselines.hpp"

namespace hdp {
namespace {

int64_t length_of(const Problem& problem, SequenceId id) { return problem.lengths[index(id)]; }

double work_of(int64_t length, int64_t degree) {
  const auto tokens = static_cast<double>(length);
  return tokens * tokens / static_cast<double>(degree);
}

// The groups of one degree in a round, oldest first. Sequences come longest first, so that a group
// without room for the current one sleeps until one is short enough.
class Groups {
 public:
  Groups(int64_t degree, int64_t num_ranks) : degree_(degree) {
    while (index(num_ranks / degree) > num_leaves_) num_leaves_ *= 2;
    work_.assign(2 * num_leaves_, kInfinity);
  }

  int64_t degree() const { return degree_; }

  std::size_t size() const { return groups_.size(); }

  std::vector<SequenceId>& sequences(std::size_t group) { return groups_[group].sequences; }

  // Whether a sequence that takes so much room, no more than any before, has a place.
  bool has_room(int64_t room) const {
    return work_[1] < kInfinity || (!asleep_.empty() && asleep_.front().first >= room);
  }

  void wake(int64_t room) {
    while (!asleep_.empty() && asleep_.front().first >= room) {
      std::pop_heap(asleep_.begin(), asleep_.end());
      const std::size_t group = asleep_.back().second;
      asleep_.pop_back();
      set_work(group, groups_[group].work);
    }
  }

  // The group of those awake at which the round's most work, now `most`, stays least with so much
  // more, the oldest of equals; and that work, kInfinity if all sleep.
  std::pair<double, std::size_t> best(double more, double most) const {
    const auto with_more = [&](std::size_t node) { return std::max(most, work_[node] + more); };
    std::size_t node = 1;
    while (node < num_leaves_) {
      node *= 2;
      if (with_more(node + 1) < with_more(node)) ++node;
    }
    return {with_more(node), node - num_leaves_};
  }

  void form(int64_t capacity) { groups_.push_back({0, capacity, {}}); }

  // Returns the work that a rank of the group has then.
  double add(std::size_t number, SequenceId id, int64_t room, double more) {
    Group& group = groups_[number];
    group.sequences.push_back(id);
    group.work += more;
    group.room -= room;
    const bool awake = group.room >= room;
    set_work(number, awake ? group.work : kInfinity);
    if (!awake) {
      asleep_.emplace_back(group.room, number);
      std::push_heap(asleep_.begin(), asleep_.end());
    }
    return group.work;
  }

 private:
  struct Group {
    double work = 0;   // of each rank
    int64_t room = 0;  // of each rank
    std::vector<SequenceId> sequences;
  };

  void set_work(std::size_t group, double work) {
    std::size_t node = num_leaves_ + group;
    work_[node] = work;
    while ((node /= 2) > 0) work_[node] = std::min(work_[2 * node], work_[2 * node + 1]);
  }

  int64_t degree_;
  std::size_t num_leaves_ = 1;
  std::vector<double> work_;  // a tree whose leaves are groups and whose nodes know the least
  std::vector<Group> groups_;
  std::vector<std::pair<int64_t, std::size_t>> asleep_;  // (room, group), a heap
};

// One micro-batch for each rank.
class Round {
 public:
  // With groups of at least so many ranks.
  Round(const Problem& problem, int64_t least) : problem_(problem), num_free_(problem.num_ranks) {
    for (int64_t degree = least; degree <= problem.num_ranks; degree *= 2) {
      groups_.emplace_back(degree, problem.num_ranks);
    }
  }

  // Deals a sequence that is no longer than any before; false if it has no place.
  bool add(SequenceId id) {
    const int64_t length = length_of(problem_, id);
    Place place;
    for (Groups& groups : groups_) {
      const int64_t room = room_for(problem_, length, groups.degree());
      if (room > problem_.tokens_per_rank) continue;
      const double more = work_of(length, groups.degree());
      groups.wake(room);
      const auto [joined, group] = groups.best(more, most_work_);
      if (joined < place.work) place = {joined, &groups, group, room, more};
      const double formed = std::max(most_work_, more);
      if (num_free_ >= groups.degree() && formed < place.work) {
        place = {formed, &groups, groups.size(), room, more};
      }
      const bool is_first = most_work_ == 0;
      if (place.work <= most_work_ || (is_first && place.groups != nullptr)) break;
    }
    if (place.groups == nullptr) return false;
    take(place, id);
    return true;
  }

  // Whether a sequence that is no longer than any before has a place; then a shorter one has, too.
  bool fits(int64_t length) const {
    return std::any_of(groups_.begin(), groups_.end(), [&](const Groups& groups) {
      const int64_t room = room_for(problem_, length, groups.degree());
      return room <= problem_.tokens_per_rank &&
             (num_free_ >= groups.degree() || groups.has_room(room));
    });
  }

  // Appends the round's micro-batches, widened until no rank is free; false if that fails.
  bool finish(Plan& plan) {
    std::vector<int64_t> degrees;  // as the groups stand on the ranks
    std::vector<const std::vector<SequenceId>*> sequences;
    // later groups have no higher degree than earlier ones: at theirs they raise the work no more
    for (auto groups = groups_.rbegin(); groups != groups_.rend(); ++groups) {
      for (std::size_t group = 0; group < groups->size(); ++group) {
        degrees.push_back(groups->degree());
        sequences.push_back(&groups->sequences(group));
      }
    }
    if (!widen(degrees)) return false;
    int32_t first = 0;
    for (std::size_t group = 0; group < degrees.size(); ++group) {
      std::vector<int32_t> ring(index(degrees[group]));
      std::iota(ring.begin(), ring.end(), first);
      first = ring.back() + 1;
      plan.add(ring, *sequences[group]);
    }
    return true;
  }

 private:
  struct Place {
    double work = kInfinity;  // the round's most with the sequence there
    Groups* groups = nullptr;
    std::size_t group = 0;
    int64_t room = 0;
    double more = 0;
  };

  void take(const Place& place, SequenceId id) {
    if (place.group == place.groups->size()) {
      place.groups->form(problem_.tokens_per_rank);
      num_free_ -= place.groups->degree();
    }
    const double work = place.groups->add(place.group, id, place.room, place.more);
    most_work_ = std::max(most_work_, work);
  }

  // Doubles the first of the least degrees while ranks are free. They descend.
  bool widen(std::vector<int64_t>& degrees) const {
    for (int64_t num_free = num_free_; num_free > 0;) {
      const int64_t least = degrees.back();
      const int64_t added = std::min(least, problem_.num_ranks - least);
      if (added > num_free) return false;
      *std::lower_bound(degrees.begin(), degrees.end(), least, std::greater<>()) += added;
      num_free -= added;
    }
    return true;
  }

  const Problem& problem_;
  int64_t num_free_;
  double most_work_ = 0;  // of a rank
  std::vector<Groups> groups_;
};

// The sequences that no round has taken, longest first.
class Waiting {
 public:
  explicit Waiting(const Problem& problem)
      : problem_(problem),
        order_(longest_first(problem.lengths)),
        left_(PlaceSet::all(order_.size())) {}

  bool empty() const { return left_.next(0) == order_.size(); }

  // Offers each to a round, skipping those that it has no place for; returns the places of what it
  // took.
  std::vector<std::size_t> deal(Round& round) const {
    std::vector<std::size_t> taken;
    for (std::size_t place = left_.next(0); place < order_.size();) {
      if (round.add(order_[place])) {
        taken.push_back(place++);
      } else {
        place = first_that_fits(round, place);
      }
      place = left_.next(place);
    }
    return taken;
  }

  void take(const std::vector<std::size_t>& places) {
    for (const std::size_t place : places) left_.erase(place);
  }

 private:
  std::size_t first_that_fits(const Round& round, std::size_t place) const {
    const auto found = std::partition_point(at(order_, place), order_.end(), [&](SequenceId id) {
      return !round.fits(length_of(problem_, id));
    });
    return index(found - order_.begin());
  }

  const Problem& problem_;
  std::vector<SequenceId> order_;
  PlaceSet left_;
};

void add_round(const Problem& problem, Waiting& waiting, Plan& plan) {
  Round round(problem, 1);
  const std::vector<std::size_t> taken = waiting.deal(round);
  if (round.finish(plan)) return waiting.take(taken);
  Round all(problem, problem.num_ranks);
  waiting.take(waiting.deal(all));
  all.finish(plan);
}

}  // namespace

int64_t room_for(const Problem& problem, int64_t length, int64_t degree) {
  return std::max(slice_tokens(length, degree, problem.slice_multiple),
                  slice_tokens(length, problem.num_ranks, problem.slice_multiple));
}

void require_powers_hold(const Problem& problem, const std::string& strategy) {
  int64_t most = 1;
  while (2 * most <= problem.num_ranks) most *= 2;
  if (room_for(problem, problem.max_length, most) <= problem.tokens_per_rank) return;
  throw std::invalid_argument(
      strategy + ": a context of " + std::to_string(problem.max_length) +
      " tokens does not fit on " + std::to_string(most) + " ranks, the greatest power of two of " +
      std::to_string(problem.num_ranks) + ", at " + std::to_string(problem.tokens_per_rank) +
      " tokens each (a slice of a shared sequence has at least 2 x " +
      std::to_string(problem.slice_multiple) + "): raise tokens_per_rank or add ranks");
}

Plan dynamic_cp(const Problem& problem) {
  require_powers_hold(problem, "dynamic-cp");
  Waiting waiting(problem);
  Plan plan;
  while (!waiting.empty()) add_round(problem, waiting, plan);
  return plan;
}

}  // namespace hdp
