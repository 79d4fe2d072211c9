#include "planner/pp_balance/seats.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "planner/rings/rings.hpp"

namespace hdp {
namespace {

// A rank at least this fast, compared with the fastest, joins rings.
constexpr double kFast = 0.8;

// The ranks of one round that have no ring yet, by node.
class FreeRanks {
 public:
  // `ranks`: ascending.
  FreeRanks(const Problem& problem, std::vector<int32_t> ranks, const std::vector<double>& loads)
      : loads_(loads), ranks_per_node_(problem.cost.ranks_per_node), ranks_(std::move(ranks)) {
    const auto more_loaded = [&](int32_t left, int32_t right) {
      return std::make_pair(loads_[index(left)], left) > std::make_pair(loads_[index(right)], right);
    };
    for (std::size_t first = 0; first < ranks_.size();) {
      std::size_t last = first;
      const int64_t node = ranks_[first] / ranks_per_node_;
      while (last < ranks_.size() && ranks_[last] / ranks_per_node_ == node) ++last;
      std::sort(at(ranks_, first), at(ranks_, last), more_loaded);
      nodes_.push_back({0, nodes_.size(), first, last});
      nodes_.back().load = mean_load(nodes_.back());
      first = last;
    }
    std::sort(nodes_.begin(), nodes_.end());
  }

  // Of the least loaded node that has so many, or of several.
  std::vector<int32_t> take(int64_t degree) {
    std::vector<int32_t> taken;
    auto from = nodes_.end();
    if (degree <= ranks_per_node_) {
      from = std::find_if(nodes_.begin(), nodes_.end(),
                          [&](const Node& one) { return one.size() >= index(degree); });
    }
    while (taken.size() < index(degree)) {
      if (from == nodes_.end()) from = nodes_.begin();
      Node node = *from;
      nodes_.erase(from);
      from = nodes_.end();
      const std::size_t kept = node.last - std::min(index(degree) - taken.size(), node.size());
      taken.insert(taken.end(), at(ranks_, kept), at(ranks_, node.last));
      node.last = kept;
      if (node.size() == 0) continue;
      node.load = mean_load(node);
      nodes_.insert(std::lower_bound(nodes_.begin(), nodes_.end(), node), node);
    }
    std::sort(taken.begin(), taken.end());
    return taken;
  }

 private:
  struct Node {
    double load = 0;  // mean of its free ranks
    std::size_t number = 0;
    std::size_t first = 0;  // of these, the most loaded first
    std::size_t last = 0;

    std::size_t size() const { return last - first; }
    bool operator<(const Node& other) const {
      return std::make_pair(load, number) < std::make_pair(other.load, other.number);
    }
  };

  double mean_load(const Node& node) const {
    double load = 0;
    for (std::size_t i = node.first; i < node.last; ++i) load += loads_[index(ranks_[i])];
    return load / static_cast<double>(node.size());
  }

  const std::vector<double>& loads_;
  int64_t ranks_per_node_;
  std::vector<int32_t> ranks_;  // by node
  std::vector<Node> nodes_;     // that have free ranks, the least loaded first
};

// Collects the rounds.
class Seater {
 public:
  explicit Seater(const Problem& problem)
      : problem_(problem), all_(index(problem.num_ranks)), longest_s_(all_.size(), 0.0) {
    std::iota(all_.begin(), all_.end(), 0);
    seating_.ring_s.assign(all_.size(), 0.0);
    seating_.weight.assign(all_.size(), 1.0);
    for (const int32_t rank : all_) seating_.speed.push_back(problem.speed(rank));
    fastest_ = *std::max_element(seating_.speed.begin(), seating_.speed.end());
  }

  const std::vector<int32_t>& all() const { return all_; }
  Seating finish() { return std::move(seating_); }

  // The fast ranks with less than most_s to do, or all fast ranks, or all: the first of these that
  // are at least `degree` ranks. The time that a long ring takes on the other stages counts, during
  // which a rank cannot work for much else.
  std::vector<int32_t> available(int64_t degree, double most_s) const {
    std::vector<int32_t> fast;
    std::vector<int32_t> idle;
    for (const int32_t rank : all_) {
      if (seating_.speed[index(rank)] < kFast * fastest_) continue;
      fast.push_back(rank);
      const double latency_s =
          static_cast<double>(problem_.pipeline_stages - 1) * longest_s_[index(rank)];
      if (seating_.ring_s[index(rank)] + latency_s < most_s) idle.push_back(rank);
    }
    if (idle.size() >= index(degree)) return idle;
    return fast.size() >= index(degree) ? fast : all_;
  }

  void add(const Round& round, std::vector<int32_t> ranks) {
    FreeRanks free(problem_, std::move(ranks), seating_.ring_s);
    std::vector<std::size_t> seats(all_.size(), kNoRing);
    for (const Shared& shared : round) {
      const int64_t length = problem_.lengths[index(shared.sequence)];
      const bool alone = !is_ring(problem_, length, shared.degree);
      SeatedRing ring{shared.sequence, shared.place, 0, alone, free.take(shared.degree)};
      for (const int32_t rank : ring.lanes) {
        ring.seconds = std::max(ring.seconds, shared.seconds / seating_.speed[index(rank)]);
      }
      for (const int32_t rank : ring.lanes) {
        seats[index(rank)] = seating_.rings.size();
        seating_.ring_s[index(rank)] += ring.seconds;
        longest_s_[index(rank)] = std::max(longest_s_[index(rank)], ring.seconds);
      }
      seating_.rings.push_back(std::move(ring));
    }
    seating_.rounds.push_back(std::move(seats));
  }

 private:
  const Problem& problem_;
  std::vector<int32_t> all_;
  std::vector<double> longest_s_;  // by rank: its longest ring
  double fastest_ = 0;
  Seating seating_;
};

// One lane for each speed.
std::vector<std::size_t> first_lanes(const Seating& seating) {
  std::map<double, std::size_t> lane_of;
  std::vector<std::size_t> lanes;
  for (const double speed : seating.speed) {
    lanes.push_back(lane_of.emplace(speed, lane_of.size()).first->second);
  }
  return lanes;
}

// In place of the ring of a rank that has a sequence for itself.
constexpr std::size_t kAlone = kNoRing - 2;

bool is_alone(const Seating& seating, std::size_t ring) {
  return ring != kNoRing && seating.rings[ring].alone;
}

// Splits lanes whose ranks are in different rings of a round, or some in none, or some alone.
void split(const Seating& seating, const std::vector<std::size_t>& seats,
           std::vector<std::size_t>& lanes) {
  const std::vector<std::size_t> old = lanes;
  std::vector<std::size_t> last_ring(old.size(), kNoRing - 1);  // by old lane
  std::vector<std::size_t> new_lane(old.size(), 0);
  std::size_t num_lanes = 0;
  const auto move = [&](std::size_t rank, std::size_t ring) {
    if (last_ring[old[rank]] != ring) {
      last_ring[old[rank]] = ring;
      new_lane[old[rank]] = num_lanes++;
    }
    lanes[rank] = new_lane[old[rank]];
  };
  for (std::size_t rank = 0; rank < old.size(); ++rank) {
    const std::size_t ring = seats[rank];
    if (ring == kNoRing) continue;
    const std::vector<int32_t>& ranks = seating.rings[ring].lanes;
    if (seating.rings[ring].alone || index(ranks.front()) != rank) continue;
    for (const int32_t member : ranks) move(index(member), ring);
  }
  for (std::size_t rank = 0; rank < old.size(); ++rank) {
    if (is_alone(seating, seats[rank])) move(rank, kAlone);
  }
  for (std::size_t rank = 0; rank < old.size(); ++rank) {
    if (seats[rank] == kNoRing) move(rank, kNoRing);
  }
}

// The rings of a round, of lanes. Sequences that the ranks of a lane have for themselves become one
// of their mean time.
void outline_round(const Seating& seating, const std::vector<std::size_t>& lanes, std::size_t round,
                   Seating& small) {
  const std::vector<std::size_t>& seats = seating.rounds[round];
  std::vector<std::size_t>& small_seats = small.rounds[round];
  for (std::size_t rank = 0; rank < seats.size(); ++rank) {
    if (seats[rank] == kNoRing) continue;
    const SeatedRing& ring = seating.rings[seats[rank]];
    if (index(ring.lanes.front()) != rank) continue;
    if (ring.alone && small_seats[lanes[rank]] != kNoRing) {
      small.rings[small_seats[lanes[rank]]].seconds += ring.seconds / small.weight[lanes[rank]];
      continue;
    }
    const double seconds = ring.alone ? ring.seconds / small.weight[lanes[rank]] : ring.seconds;
    SeatedRing seated{ring.sequence, ring.place, seconds, ring.alone, {}, ring.num_parts};
    for (const int32_t member : ring.lanes) {
      seated.lanes.push_back(static_cast<int32_t>(lanes[index(member)]));
    }
    std::sort(seated.lanes.begin(), seated.lanes.end());
    seated.lanes.erase(std::unique(seated.lanes.begin(), seated.lanes.end()), seated.lanes.end());
    for (const int32_t lane : seated.lanes) small_seats[index(lane)] = small.rings.size();
    small.rings.push_back(std::move(seated));
  }
}

}  // namespace

Seating seat(const Problem& problem, const std::vector<LongSequence>& sequences,
             const DealingRule& dealing) {
  Seater seater(problem);
  RoundMaker maker(problem, sequences);
  double last_s = 0;
  for (int64_t place = 0; !maker.empty(); ++place) {
    std::vector<int32_t> ranks = seater.available(maker.longest().least, dealing.most_s);
    const bool is_first_of_group = place % dealing.group == 0;
    const double least_s = (is_first_of_group ? dealing.grade : 1.0) * last_s;
    const Round round =
        maker.take(static_cast<int64_t>(ranks.size()), std::max(dealing.level_s, least_s));
    if (is_first_of_group) last_s = round.front().seconds;
    seater.add(round, std::move(ranks));
  }
  return seater.finish();
}

Seating seat_on_all(const Problem& problem, const std::vector<LongSequence>& sequences) {
  Seater seater(problem);
  for (const Round& round : whole_rounds(problem, sequences)) seater.add(round, seater.all());
  return seater.finish();
}

Outline outline(const Seating& seating) {
  Outline result{{}, first_lanes(seating)};
  std::vector<std::size_t>& lanes = result.lane_of_rank;
  for (const auto& seats : seating.rounds) split(seating, seats, lanes);
  const std::size_t num_lanes = *std::max_element(lanes.begin(), lanes.end()) + 1;

  Seating& small = result.seating;
  small.ring_s.assign(num_lanes, 0.0);
  small.speed.assign(num_lanes, 0.0);
  small.weight.assign(num_lanes, 0.0);
  small.rounds.assign(seating.rounds.size(), std::vector<std::size_t>(num_lanes, kNoRing));
  for (std::size_t rank = 0; rank < lanes.size(); ++rank) {
    small.ring_s[lanes[rank]] += seating.ring_s[rank];
    small.speed[lanes[rank]] = seating.speed[rank];
    small.weight[lanes[rank]] += 1;
  }
  for (std::size_t lane = 0; lane < num_lanes; ++lane) small.ring_s[lane] /= small.weight[lane];
  for (std::size_t round = 0; round < seating.rounds.size(); ++round) {
    outline_round(seating, lanes, round, small);
  }
  return result;
}

}  // namespace hdp
