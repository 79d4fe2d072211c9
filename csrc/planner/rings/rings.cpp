#include "planner/rings/rings.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "planner/base/cost_model.hpp"
#include "planner/base/slices.hpp"
#include "planner/base/stream.hpp"
#include "planner/schedule/ways.hpp"

namespace hdp {
namespace {

// Places of the sequences that are rings, in the order in which they are placed.
std::vector<std::size_t> widest_first(const Batch& batch, const Degrees& degrees) {
  std::vector<std::size_t> places;
  for (std::size_t place = 0; place < degrees.size(); ++place) {
    if (is_ring(batch.problem, batch.length(place), degrees[place])) places.push_back(place);
  }
  const auto wider = [&](std::size_t left, std::size_t right) {
    return degrees[left] > degrees[right];
  };
  if (!std::is_sorted(places.begin(), places.end(), wider)) {
    std::stable_sort(places.begin(), places.end(), wider);
  }
  return places;
}

// The most preferred ranks that a node has.
int64_t largest_node(const std::vector<bool>& preferred, int64_t ranks_per_node) {
  int64_t largest = 0;
  int64_t size = 0;
  for (std::size_t rank = 0; rank < preferred.size(); ++rank) {
    if (static_cast<int64_t>(rank) % ranks_per_node == 0) size = 0;
    if (preferred[rank]) largest = std::max(largest, ++size);
  }
  return largest;
}

// All ranks in the order in which rings prefer them.
std::vector<int32_t> preference(const Problem& problem, const Decisions& decisions) {
  std::vector<int32_t> ranks(index(problem.num_ranks));
  std::iota(ranks.begin(), ranks.end(), 0);
  if (decisions.alike_speeds) {
    std::stable_sort(ranks.begin(), ranks.end(), [&](int32_t left, int32_t right) {
      return problem.speed(left) > problem.speed(right);
    });
  }
  return ranks;
}

// The least degree at which the sequence takes at most `seconds`; 0 if traffic would be exposed.
int64_t filling_degree(const Batch& batch, std::size_t place, double seconds) {
  const Problem& problem = batch.problem;
  const double room_s = seconds - problem.cost.g;
  if (!(room_s > 0)) return 0;
  const double parts =
      std::ceil(parts_within(problem.cost, batch.length(place), batch.compute_s(place), room_s));
  if (parts > static_cast<double>(batch.hidden[place])) return 0;
  const int64_t degree = std::max<int64_t>(batch.least[place], static_cast<int64_t>(parts));
  return may_share(problem, batch.length(place), batch.least[place], degree) ? degree : 0;
}

class RingPlacer {
 public:
  RingPlacer(const Batch& batch, const Decisions& decisions)
      : batch_(batch),
        problem_(batch.problem),
        decisions_(decisions),
        preference_(preference(problem_, decisions)),
        preferred_(preference_.size()),
        spare_room_(batch, decisions.fill_spare_room ? places_of_shorts(batch, decisions.degrees)
                                                     : PlaceSet()) {
    for (std::size_t rank = 0; rank < preferred_.size(); ++rank) {
      preferred_[rank] = problem_.speed(static_cast<int32_t>(rank)) >= decisions.least_speed;
    }
    schedule_.clocks.assign(preferred_.size(), batch.ramp * batch.full_s);
    if (batch.ramp > 0) longest_s_.assign(preferred_.size(), batch.full_s);
  }

  RingSchedule run() {
    const std::vector<std::size_t> places = widest_first(batch_, decisions_.degrees);
    make_room(places);
    auto next = places.begin();
    const auto degree = [&] { return decisions_.degrees[*next]; };
    const auto more = [&](int64_t than) { return next != places.end() && degree() > than; };
    FreeRanks free(preference_);
    const auto place_wide = [&] {
      start_on(free, free.take(degree()), *next);
      ++next;
    };
    const auto num_preferred = std::count(preferred_.begin(), preferred_.end(), true);
    while (more(num_preferred)) place_wide();
    free.remove(preferred_);
    const int64_t per_node = problem_.cost.ranks_per_node;
    const int64_t widest = decisions_.alike_speeds ? 1 : largest_node(preferred_, per_node);
    if (decisions_.column_s > 0) place_columns(free, widest, next, places.end());
    while (more(widest)) place_wide();
    NodeRanks nodes(schedule_.clocks, preferred_, per_node);
    for (; next != places.end(); ++next) nodes.give_back(start(*next, nodes.take(degree())));
    if (decisions_.fill_spare_room) schedule_.shorts = spare_room_.take_remaining();
    return std::move(schedule_);
  }

 private:
  using Places = std::vector<std::size_t>::const_iterator;

  // So that a schedule of millions of rings does not move while it grows.
  void make_room(const std::vector<std::size_t>& places) {
    std::size_t num_members = 0;
    for (const std::size_t place : places) {
      num_members += index(decisions_.degrees[place]);
    }
    schedule_.places.reserve(places.size());
    schedule_.offsets.reserve(places.size() + 1);
    schedule_.ranks.reserve(num_members);
    if (!decisions_.fill_spare_room) return;
    schedule_.local_ends.reserve(places.size());
    schedule_.locals.ranks.reserve(batch_.order.size());
    schedule_.locals.sequences.reserve(batch_.order.size());
  }

  // Places the rings that are wider than `widest` in columns, the longest first; leaves `next` at
  // the first of the others.
  void place_columns(FreeRanks& free, int64_t widest, Places& next, Places end) {
    const Places first = next;
    while (next != end && decisions_.degrees[*next] > widest) ++next;
    std::vector<std::size_t> wide(first, next);
    std::sort(wide.begin(), wide.end());
    for (const std::size_t place : wide) {
      const Column column = best_column(batch_, free, place, decisions_.column_s);
      start_on(free,
               column.degree > 0 ? free.take_from(column.group, column.degree)
                                 : free.take(decisions_.degrees[place]),
               place);
    }
  }

  // Starts the ring of a sequence on ranks taken from `free`, which they return to. They are in
  // order of preference: ascending where speeds decide nothing.
  void start_on(FreeRanks& free, std::vector<int32_t> ranks, std::size_t place) {
    std::vector<int32_t> ring = ranks;
    if (decisions_.alike_speeds) std::sort(ring.begin(), ring.end());
    const double end = start(place, ring);
    free.give_back(std::move(ranks), end);
  }

  // Starts the ring of a sequence on ranks that ascend, records how long each member waited,
  // returns when it ends.
  double start(std::size_t place, const std::vector<int32_t>& ranks) {
    double begin = 0;
    double speed = problem_.speed(ranks.front());
    for (const int32_t rank : ranks) {
      begin = std::max(begin, schedule_.clocks[index(rank)]);
      speed = std::min(speed, problem_.speed(rank));
    }
    for (const int32_t rank : ranks) {
      const double waited = begin - schedule_.clocks[index(rank)];
      if (waited > 0) schedule_.gaps.push_back({schedule_.places.size(), rank, waited});
    }
    const auto degree = static_cast<int64_t>(ranks.size());
    const int64_t length = batch_.length(place);
    const Links links = links_of(problem_.cost, {ranks.data(), ranks.data() + ranks.size()});
    double seconds = sequence_s(problem_, length, degree, links, speed);
    if (decisions_.fill_spare_room) {
      const int64_t slice = slice_tokens(length, degree, problem_.slice_multiple);
      const int64_t room = std::max<int64_t>(0, problem_.tokens_per_rank - slice);
      seconds += spare_room_.fill(ranks, room, schedule_.locals) / speed;
      schedule_.local_ends.push_back(schedule_.locals.sequences.size());
    }
    double part_s = seconds;
    if (batch_.ramp > 0) {
      const auto stream = stream_of(problem_, length, degree);
      if (stream) part_s = longest_part_s(problem_, length, *stream, seconds);
    }
    const double end = begin + seconds + ramp_s(ranks, part_s);
    for (const int32_t rank : ranks) schedule_.clocks[index(rank)] = end;
    schedule_.places.push_back(place);
    schedule_.ranks.insert(schedule_.ranks.end(), ranks.begin(), ranks.end());
    schedule_.offsets.push_back(schedule_.ranks.size());
    return end;
  }

  // What a micro-batch, or part, that is the longest one of its ranks adds, which it is from now on.
  double ramp_s(const std::vector<int32_t>& ranks, double seconds) {
    if (batch_.ramp == 0) return 0;
    double longest_s = 0;
    for (const int32_t rank : ranks) {
      longest_s = std::max(longest_s, longest_s_[index(rank)]);
    }
    for (const int32_t rank : ranks) {
      longest_s_[index(rank)] = std::max(longest_s, seconds);
    }
    return batch_.ramp * std::max(0.0, seconds - longest_s);
  }

  const Batch& batch_;
  const Problem& problem_;
  const Decisions& decisions_;
  std::vector<int32_t> preference_;
  std::vector<bool> preferred_;    // by rank
  std::vector<double> longest_s_;  // micro-batch, by rank, with pipeline stages
  SpareRoom spare_room_;
  RingSchedule schedule_;
};

}  // namespace

bool is_ring(const Problem& problem, int64_t length, int64_t degree) {
  return degree > 1 || slice_tokens(length, 1, problem.slice_multiple) > problem.tokens_per_rank;
}

PlaceSet places_of_shorts(const Batch& batch, const Degrees& degrees) {
  PlaceSet places(batch.order.size());
  for (std::size_t place = 0; place < batch.order.size(); ++place) {
    const bool is_big = place < degrees.size();
    if (is_big && is_ring(batch.problem, batch.length(place), degrees[place])) continue;
    places.insert(place);
  }
  return places;
}

Column best_column(const Batch& batch, const FreeRanks& free, std::size_t place, double until_s) {
  const Problem& problem = batch.problem;
  Column best;
  double least_left_s = 0;
  for (std::size_t group = 0; group < free.groups().size(); ++group) {
    const auto& [clock, ranks] = free.groups()[group];
    const int64_t degree = filling_degree(batch, place, until_s - clock);
    if (degree == 0 || degree > static_cast<int64_t>(ranks.size())) continue;
    const double blocks_s = static_cast<double>(degree) * problem.cost.block_all_layers_s;
    const double left_s = until_s - clock - blocks_s -
                          batch.compute_s(place) / static_cast<double>(degree) -
                          merge_s(problem.cost, degree, static_cast<double>(batch.length(place)));
    if (best.degree > 0 && left_s >= least_left_s) continue;
    best = {group, degree};
    least_left_s = left_s;
  }
  return best;
}

SpareRoom::SpareRoom(const Batch& batch, PlaceSet shorts)
    : batch_(batch), shorts_(std::move(shorts)) {}

// Moves the longest sequence of at most `longest` tokens that fits to the member, if there is one.
bool SpareRoom::place_longest(Member& member, int64_t longest) {
  const int64_t multiple = batch_.problem.slice_multiple;
  const int64_t limit = std::min(longest, member.room / multiple * multiple);
  const std::size_t place = shorts_.next(batch_.lengths.first_within(limit));
  if (place == shorts_.size()) return false;
  shorts_.erase(place);
  member.room -= slice_tokens(batch_.length(place), 1, multiple);
  member.seconds += batch_.compute_s(place);
  member.sequences.push_back(batch_.order[place]);
  return true;
}

double SpareRoom::fill(const std::vector<int32_t>& ranks, int64_t room, Locals& locals) {
  std::vector<Member> members(ranks.size());
  for (Member& member : members) {
    member.room = room;
    member.seconds = batch_.problem.cost.block_all_layers_s;
  }
  double level = 0;
  while (place_longest(members.front(), room)) {
    level = std::max(level, members.front().seconds);
    for (Member& member : members) {
      while (place_longest(member, length_within(batch_.problem.cost, level - member.seconds))) {
      }
    }
  }
  for (std::size_t i = 0; i < members.size(); ++i) {
    const std::vector<SequenceId>& ids = members[i].sequences;
    locals.sequences.insert(locals.sequences.end(), ids.begin(), ids.end());
    locals.ranks.insert(locals.ranks.end(), ids.size(), ranks[i]);
  }
  return level;
}

RingSchedule place_rings(const Batch& batch, const Decisions& decisions) {
  return RingPlacer(batch, decisions).run();
}

}  // namespace hdp
