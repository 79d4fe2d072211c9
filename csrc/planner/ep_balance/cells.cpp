#include "planner/ep_balance/cells.hpp"

#include <algorithm>
#include <array>

#include "planner/base/cost_model.hpp"
#include "planner/base/slices.hpp"

namespace hdp {
namespace {

// Sequences of more than such a part of the mean load are sharded, in the order of the trials.
constexpr std::array<double, 5> kParts{0.5, 0.25, 0.1, 0.03, 0.005};

// A cell that wastes no more of its time is good enough.
constexpr double kLittle = 0.004;

double wasted(const Cell& cell) {
  const double whole = cell.seconds * static_cast<double>(cell.num_ranks);
  return cell.dense_s > 0 ? (whole - cell.dense_s) / whole : 1;
}

class Sharing {
 public:
  Sharing(const Problem& dense, const Items& items, int32_t first, int64_t num_ranks)
      : problem_(dense), items_(items) {
    cell_.first = first;
    cell_.num_ranks = num_ranks;
  }

  Cell run(const Places& given, std::size_t num_sharded) {
    for (std::size_t i = 0; i < num_sharded; ++i) shard(given[i]);
    start();
    for (std::size_t i = num_sharded; i < given.size(); ++i) place(given[i]);
    std::sort(cell_.locals.begin(), cell_.locals.end());
    cell_.seconds = *std::max_element(loads_.begin(), loads_.end());
    return std::move(cell_);
  }

 private:
  double speed(std::size_t rank) const {
    return problem_.speed(cell_.first + static_cast<int32_t>(rank));
  }

  void shard(std::size_t place) {
    const Item& item = items_[place];
    const int64_t slice = slice_tokens(item.length, cell_.num_ranks, problem_.slice_multiple);
    if (slice_ + slice > problem_.tokens_per_rank) {
      cell_.left.push_back(place);
      return;
    }
    slice_ += slice;
    tokens_ += static_cast<double>(item.length);
    attention_s_ += attention_s(problem_.cost, item.length);
    cell_.dense_s += item.dense_s;
    cell_.sharded.push_back(place);
  }

  // The loads of the ring.
  void start() {
    const auto num_ranks = static_cast<std::size_t>(cell_.num_ranks);
    loads_.assign(num_ranks, 0);
    rooms_.assign(num_ranks, problem_.tokens_per_rank - slice_);
    if (cell_.sharded.empty()) return;
    const CostModel& cost = problem_.cost;
    const int64_t per_node = cost.ranks_per_node;
    const bool one_node =
        cell_.first / per_node == (cell_.first + cell_.num_ranks - 1) / per_node;
    const auto d = static_cast<double>(cell_.num_ranks);
    const double own_s =
        cell_.dense_s / d + fixed_s(cost, cell_.num_ranks) + merge_s(cost, cell_.num_ranks, tokens_);
    for (std::size_t rank = 0; rank < num_ranks; ++rank) {
      const double speed_ = speed(rank);
      loads_[rank] = own_s / speed_ + exposed_s(cost, cell_.num_ranks, tokens_,
                                                attention_s_ / d / speed_, one_node);
    }
  }

  void place(std::size_t place) {
    const Item& item = items_[place];
    const int64_t tokens = slice_tokens(item.length, 1, problem_.slice_multiple);
    std::size_t best = loads_.size();
    for (std::size_t rank = 0; rank < loads_.size(); ++rank) {
      if (rooms_[rank] < tokens) continue;
      if (best == loads_.size() || loads_[rank] < loads_[best]) best = rank;
    }
    if (best == loads_.size()) {
      cell_.left.push_back(place);
      return;
    }
    const bool is_first = rooms_[best] == problem_.tokens_per_rank - slice_;
    const CostModel& cost = problem_.cost;
    const double begun_s = !is_first ? 0 : cell_.sharded.empty() ? fixed_s(cost, 1) : cost.block_s;
    rooms_[best] -= tokens;
    loads_[best] += (item.dense_s + begun_s) / speed(best);
    cell_.dense_s += item.dense_s;
    cell_.locals.emplace_back(cell_.first + static_cast<int32_t>(best), place);
  }

  const Problem& problem_;
  const Items& items_;
  Cell cell_;
  int64_t slice_ = 0;  // of the ring on each rank
  double tokens_ = 0;  // of the ring
  double attention_s_ = 0;
  std::vector<double> loads_;
  std::vector<int64_t> rooms_;
};

}  // namespace

int64_t ring_room(const Problem& problem) {
  const int64_t two_chunks = 2 * problem.slice_multiple;
  return problem.tokens_per_rank / two_chunks * two_chunks;
}

Cell shared_cell(const Problem& dense, const Items& items, int32_t first, int64_t num_ranks,
                 const Places& given) {
  double mean_s = 0;
  for (const std::size_t place : given) mean_s += items[place].dense_s;
  mean_s /= static_cast<double>(num_ranks);
  const auto num_above = [&](const auto& is_above) {
    const auto end = std::partition_point(given.begin(), given.end(), [&](std::size_t place) {
      return is_above(items[place]);
    });
    return static_cast<std::size_t>(end - given.begin());
  };
  std::size_t num_sharded = num_above([&](const Item& item) {
    return slice_tokens(item.length, 1, dense.slice_multiple) > dense.tokens_per_rank;
  });
  Cell best = Sharing(dense, items, first, num_ranks).run(given, num_sharded);
  for (const double part : kParts) {
    if (num_ranks == 1 || wasted(best) <= kLittle) break;
    const std::size_t more =
        num_above([&](const Item& item) { return item.dense_s > part * mean_s; });
    if (more <= num_sharded) continue;
    num_sharded = more;
    Cell next = Sharing(dense, items, first, num_ranks).run(given, num_sharded);
    if (wasted(next) < wasted(best)) best = std::move(next);
  }
  return best;
}

}  // namespace hdp
