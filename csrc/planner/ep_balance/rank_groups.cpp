#include "planner/ep_balance/rank_groups.hpp"

#include <algorithm>
#include <array>

#include "planner/base/cost_model.hpp"
#include "planner/base/slices.hpp"

namespace hdp {
namespace {

// Sequences of more than such a part of the mean load are sharded, in the order of the trials.
constexpr std::array<double, 5> kParts{0.5, 0.25, 0.1, 0.03, 0.005};

// A group that wastes no more of its time is good enough.
constexpr double kLittle = 0.004;

// What is summed in another order may differ by so much.
constexpr double kRounding = 1 + 1e-12;

// The first rank that has done least of those that have room; their number if none has.
std::size_t least_loaded(const std::vector<double>& loads, const std::vector<int64_t>& rooms,
                         int64_t tokens) {
  std::size_t best = 0;
  for (std::size_t rank = 1; rank < loads.size(); ++rank) {
    best = loads[rank] < loads[best] ? rank : best;
  }
  if (rooms[best] >= tokens) return best;
  best = loads.size();
  for (std::size_t rank = 0; rank < loads.size(); ++rank) {
    if (rooms[rank] < tokens) continue;
    if (best == loads.size() || loads[rank] < loads[best]) best = rank;
  }
  return best;
}

}  // namespace

int64_t ring_room(const Problem& problem) {
  const int64_t two_chunks = 2 * problem.slice_multiple;
  return problem.tokens_per_rank / two_chunks * two_chunks;
}

void GroupSharing::share(Row& row, RankGroup& group, double enough_s) {
  given_ = row.places.data() + group.begin;
  const std::size_t* end = row.places.data() + group.end;
  const auto num_ranks = static_cast<double>(group.num_ranks);
  double mean_s = 0;
  std::for_each(given_, end, [&](std::size_t place) { mean_s += items_[place].dense_s; });
  mean_s /= num_ranks;
  const auto num_above = [&](const auto& is_above) {
    const auto last = std::partition_point(
        given_, end, [&](std::size_t place) { return is_above(items_[place]); });
    return index(last - given_);
  };
  double waste = 2;
  bool has_left = false;
  const auto take = [&] {
    const double whole_s = seconds_ * num_ranks;
    const double next = dense_s_ > 0 ? (whole_s - dense_s_) / whole_s : 1;
    if (next >= waste) return;
    std::copy_n(owners_.begin(), group.end - group.begin, row.owners.data() + group.begin);
    group.seconds = seconds_;
    group.dense_s = dense_s_;
    waste = next;
    has_left = has_left_;
  };
  std::size_t num_sharded =
      num_above([&](const Item& item) { return item.tokens > problem_.tokens_per_rank; });
  draft(group, num_sharded, kInfinity);
  take();
  for (const double part : kParts) {
    if (group.num_ranks == 1 || waste <= kLittle) return;
    if (!has_left && group.seconds <= enough_s) return;
    const double least_s = part * mean_s;
    const std::size_t more = num_above([&](const Item& item) { return item.dense_s > least_s; });
    if (more <= num_sharded) continue;
    num_sharded = more;
    const double limit_s = waste < 1 ? kRounding * mean_s / (1 - waste) : kInfinity;
    if (draft(group, num_sharded, limit_s)) take();
  }
}

// Whether no rank takes longer than the limit; else the draft is given up.
bool GroupSharing::draft(const RankGroup& group, std::size_t num_sharded, double limit_s) {
  owners_.resize(group.end - group.begin);
  has_left_ = false;
  const Ring ring = ring_of(group, num_sharded);
  start(group, ring);
  dense_s_ = ring.dense_s;
  seconds_ = *std::max_element(loads_.begin(), loads_.end());
  if (seconds_ > limit_s) return false;
  const CostModel& cost = problem_.cost;
  const double begun_s = ring.is_empty ? fixed_s(cost, 1) : cost.block_all_layers_s;
  const int64_t room = problem_.tokens_per_rank - ring.slice;
  for (std::size_t i = num_sharded; i < owners_.size(); ++i) {
    const Item& item = items_[given_[i]];
    const std::size_t rank = least_loaded(loads_, rooms_, item.tokens);
    if (rank == loads_.size()) {
      owners_[i] = kLeft;
      has_left_ = true;
      continue;
    }
    owners_[i] = static_cast<int32_t>(rank);
    const double own_s = item.dense_s + (rooms_[rank] == room ? begun_s : 0);
    rooms_[rank] -= item.tokens;
    loads_[rank] += own_s / problem_.speed(group.first + owners_[i]);
    dense_s_ += item.dense_s;
    if (loads_[rank] <= seconds_) continue;
    seconds_ = loads_[rank];
    if (seconds_ > limit_s) return false;
  }
  return true;
}

GroupSharing::Ring GroupSharing::ring_of(const RankGroup& group, std::size_t num_sharded) {
  Ring ring;
  for (std::size_t i = 0; i < num_sharded; ++i) {
    const Item& item = items_[given_[i]];
    const int64_t slice = slice_tokens(item.length, group.num_ranks, problem_.slice_multiple);
    if (ring.slice + slice > problem_.tokens_per_rank) {
      owners_[i] = kLeft;
      has_left_ = true;
      continue;
    }
    owners_[i] = kSharded;
    ring.slice += slice;
    ring.tokens += static_cast<double>(item.length);
    ring.attention_s += attention_s(problem_.cost, item.length);
    ring.dense_s += item.dense_s;
    ring.is_empty = false;
  }
  return ring;
}

// The loads of the ring.
void GroupSharing::start(const RankGroup& group, const Ring& ring) {
  loads_.assign(index(group.num_ranks), 0);
  rooms_.assign(index(group.num_ranks), problem_.tokens_per_rank - ring.slice);
  if (ring.is_empty) return;
  const CostModel& cost = problem_.cost;
  const Links links = links_of_block(cost, group.first, group.num_ranks);
  const auto d = static_cast<double>(group.num_ranks);
  const double own_s =
      ring.dense_s / d + fixed_s(cost, group.num_ranks) +
      merge_s(cost, group.num_ranks, ring.tokens) -
      spared_s(cost, group.num_ranks, ring.tokens, ring.attention_s / d, links);
  const auto load_s = [&](int32_t rank) {
    const double speed = problem_.speed(group.first + rank);
    return own_s / speed +
           exposed_s(cost, group.num_ranks, ring.tokens, ring.attention_s / d / speed, links);
  };
  loads_.assign(index(group.num_ranks), load_s(0));
  if (problem_.speeds.empty()) return;
  for (int32_t rank = 1; rank < group.num_ranks; ++rank) loads_[index(rank)] = load_s(rank);
}

}  // namespace hdp
