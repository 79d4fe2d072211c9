#include "media/items.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace hdp {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kGoodEnough = 1.004;   // of the bound: nothing else is tried
constexpr double kFull = 1.001;         // of the bound: nearer items fill no rank beyond it
constexpr double kNearIsWorth = 1.004;  // of a plan that looks at no consumer
constexpr double kCutShares[] = {1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.125, 1.5, 2.5, kInfinity};
constexpr double kNearShares[] = {1.0, 0.25, 0.0625};
constexpr std::size_t kMostItems = std::numeric_limits<int32_t>::max();
constexpr std::size_t kMostCounted = std::size_t{1} << 22;

void check(const ItemProblem& problem) {
  const auto refuse = [](const std::string& what) { throw std::invalid_argument(what); };
  if (problem.speeds.empty()) refuse("found no rank; expected one");
  for (const double speed : problem.speeds) {
    if (!(speed > 0) || !std::isfinite(speed)) {
      refuse("found the speed " + std::to_string(speed) + "; expected a number above 0");
    }
  }
  if (!problem.busy_s.empty() && problem.busy_s.size() != problem.speeds.size()) {
    refuse("found " + std::to_string(problem.busy_s.size()) + " ranks that are busy and speeds of " +
           std::to_string(problem.speeds.size()) + "; expected as many of both");
  }
  if (!(problem.free_s >= 0) || !std::isfinite(problem.free_s)) {
    refuse("found encoding free for " + std::to_string(problem.free_s) +
           " s; expected a number from 0 on");
  }
  for (const double busy_s : problem.busy_s) {
    if (!(busy_s >= 0) || !std::isfinite(busy_s)) {
      refuse("found a rank busy for " + std::to_string(busy_s) + " s; expected a number from 0 on");
    }
  }
  const std::size_t count = problem.patches.size();
  if (count > kMostItems) refuse("found more than 2^31 items");
  if (!problem.consumers.empty() && problem.consumers.size() != count) {
    refuse("found " + std::to_string(count) + " items and consumers of " +
           std::to_string(problem.consumers.size()) + "; expected as many of both");
  }
  const auto num_ranks = static_cast<int64_t>(problem.speeds.size());
  for (const int32_t rank : problem.consumers) {
    if (rank < 0 || rank >= num_ranks) {
      refuse("found the consumer " + std::to_string(rank) + "; expected a rank from 0 to " +
             std::to_string(num_ranks - 1));
    }
  }
  if (std::min({problem.ranks_per_node, problem.most_ranks, problem.patches_per_row,
                problem.patches_per_pack}) < 1) {
    refuse("found ranks of a node or an item, patches of a row or a pack below 1; expected more");
  }
  for (const int64_t patches : problem.patches) {
    if (patches < 1 || patches % problem.patches_per_row != 0) {
      refuse("found an item of " + std::to_string(patches) + " patches; expected a multiple of " +
             std::to_string(problem.patches_per_row) + " above 0");
    }
  }
  const ItemCost& cost = problem.cost;
  for (const double one : {cost.patch_s, cost.patch2_s, cost.pack_s, cost.gathered_s_per_patch}) {
    if (!(one >= 0) || !std::isfinite(one)) {
      refuse("found the cost " + std::to_string(one) + "; expected a number from 0 on");
    }
  }
  if (!(cost.patch_s + cost.patch2_s > 0)) refuse("found items that cost nothing");
}

// Units of one speed by when they are done: the first is found at once, a change takes log N.
class Tournament {
 public:
  void add(int32_t unit, double done) { winners_.push_back({done, unit}); }

  // Call it once, when all are there.
  void begin() {
    const std::vector<std::pair<double, int32_t>> units = std::move(winners_);
    for (size_ = 1; size_ < units.size();) size_ *= 2;
    winners_.assign(2 * size_, {kInfinity, 0});
    std::copy(units.begin(), units.end(), winners_.begin() + static_cast<std::ptrdiff_t>(size_));
    for (std::size_t i = size_ - 1; i > 0; --i) play(i);
  }

  // When the first unit is done, and which it is.
  const std::pair<double, int32_t>& first() const { return winners_[1]; }

  void set(std::size_t place, double done) {
    std::size_t i = size_ + place;
    winners_[i].first = done;
    for (i /= 2; i > 0; i /= 2) play(i);
  }

 private:
  void play(std::size_t i) { winners_[i] = std::min(winners_[2 * i], winners_[2 * i + 1]); }

  std::size_t size_ = 1;
  std::vector<std::pair<double, int32_t>> winners_;  // of the whole, its halves, ..., each unit
};

// Units are ranks, or groups of as many neighbours in a node, which wait for each other.
class Units {
 public:
  Units(const ItemProblem& problem, std::vector<double>& done, int64_t degree)
      : speeds_(problem.speeds), done_(done), degree_(static_cast<std::size_t>(degree)) {
    const auto per_node = static_cast<std::size_t>(problem.ranks_per_node);
    std::vector<double> slowest;
    for (std::size_t node = 0; node < done.size(); node += per_node) {
      const std::size_t end = std::min(node + per_node, done.size());
      for (std::size_t first = node; first + degree_ <= end; first += degree_) {
        firsts_.push_back(first);
        const auto begin = speeds_.begin() + at(first);
        slowest.push_back(*std::min_element(begin, begin + at(degree_)));
      }
    }
    kinds_ = slowest;
    std::sort(kinds_.begin(), kinds_.end(), std::greater<>());
    kinds_.erase(std::unique(kinds_.begin(), kinds_.end()), kinds_.end());
    tournaments_.resize(kinds_.size());
    std::vector<int32_t> counts(kinds_.size(), 0);
    for (std::size_t unit = 0; unit < firsts_.size(); ++unit) {
      const auto kind = static_cast<std::size_t>(
          std::lower_bound(kinds_.begin(), kinds_.end(), slowest[unit], std::greater<>()) -
          kinds_.begin());
      places_.push_back({kind, static_cast<std::size_t>(counts[kind]++)});
      tournaments_[kind].add(static_cast<int32_t>(unit), starts(unit));
    }
    for (Tournament& one : tournaments_) one.begin();
  }

  // The unit that would be done first with what takes so long at speed 1.
  std::size_t first_with(double takes) const {
    double earliest = kInfinity;
    int32_t best = 0;
    for (std::size_t kind = 0; kind < kinds_.size(); ++kind) {
      const auto& [done, unit] = tournaments_[kind].first();
      const double ends = done + takes / kinds_[kind];
      if (ends < earliest) {
        earliest = ends;
        best = unit;
      }
    }
    return static_cast<std::size_t>(best);
  }

  // Its first rank.
  int32_t run(std::size_t unit, double takes) {
    const auto& [kind, place] = places_[unit];
    const double ends = starts(unit) + takes / kinds_[kind];
    std::fill_n(done_.begin() + at(firsts_[unit]), degree_, ends);
    tournaments_[kind].set(place, ends);
    return static_cast<int32_t>(firsts_[unit]);
  }

 private:
  static std::ptrdiff_t at(std::size_t rank) { return static_cast<std::ptrdiff_t>(rank); }

  double starts(std::size_t unit) const {
    const auto first = done_.begin() + at(firsts_[unit]);
    return *std::max_element(first, first + at(degree_));
  }

  const std::vector<double>& speeds_;
  std::vector<double>& done_;  // of each rank
  std::size_t degree_;
  std::vector<std::size_t> firsts_;  // of each unit
  std::vector<double> kinds_;        // speeds, fastest first
  std::vector<Tournament> tournaments_;
  std::vector<std::pair<std::size_t, std::size_t>> places_;  // of each unit: kind, place in it
};

struct Item {
  int64_t patches = 0;
  int32_t number = 0;
  int32_t consumer = 0;
};

// What does not depend on how items are placed.
class Items {
 public:
  explicit Items(const ItemProblem& problem)
      : problem(problem),
        cost(problem.cost),
        num_ranks(static_cast<int32_t>(problem.speeds.size())),
        pack_s_per_patch(cost.pack_s / static_cast<double>(problem.patches_per_pack)) {
    sort();
    for (const double speed : problem.speeds) {
      total_speed += speed;
      top_speed = std::max(top_speed, speed);
    }
    const int64_t most =
        std::min({problem.ranks_per_node, problem.most_ranks, static_cast<int64_t>(num_ranks)});
    while (2 * most_degree <= most) most_degree *= 2;
    for (const int64_t patches : problem.patches) total_s += whole_s(patches);
    bound_s = std::max(even_end_s(), problem.free_s);
    const double first_s =
        problem.busy_s.empty() ? 0 : *std::min_element(problem.busy_s.begin(), problem.busy_s.end());
    even_s = bound_s - first_s;
    for (const Item& item : order) {  // the rest take less
      const double best_s = cut_s(item.patches, best_degree(item.patches, 0)) / top_speed;
      bound_s = std::max(bound_s, first_s + best_s);
      if (first_s + whole_s(item.patches) / top_speed <= bound_s) break;
    }
  }

  // Of an item that shares its pack with others.
  double whole_s(int64_t patches) const {
    const auto n = static_cast<double>(patches);
    return (cost.patch_s + cost.patch2_s * n + pack_s_per_patch) * n;
  }

  int64_t largest_piece(int64_t patches, int64_t degree) const {
    const int64_t rows = patches / problem.patches_per_row;
    return (rows + degree - 1) / degree * problem.patches_per_row;
  }

  // Of the largest piece of an item, on a rank of speed 1; whole with degree 1.
  double cut_s(int64_t patches, int64_t degree) const {
    if (degree == 1) return whole_s(patches);
    const auto n = static_cast<double>(patches);
    const auto piece = static_cast<double>(largest_piece(patches, degree));
    const double attention = cost.patch2_s * n * piece;
    const double hidden = attention * (1 - 1 / static_cast<double>(degree));
    const double waits = std::max(cost.gathered_s_per_patch * (n - piece) - hidden, 0.0);
    return cost.patch_s * piece + attention + cost.pack_s + waits;
  }

  // The least degree with which an item takes no longer than this, or the fastest one.
  int64_t best_degree(int64_t patches, double limit_s) const {
    int64_t best = 0;
    double least = kInfinity;
    for (int64_t degree = 1; degree <= most_degree; degree *= 2) {
      if (degree > patches / problem.patches_per_row) break;
      if (largest_piece(patches, degree) > problem.patches_per_pack) continue;
      const double takes = cut_s(patches, degree);
      if (takes < least) {
        least = takes;
        best = degree;
      }
      if (takes <= limit_s) break;
    }
    if (best == 0) {
      throw std::invalid_argument(
          "found an item of " + std::to_string(patches) + " patches; expected at most " +
          std::to_string(problem.patches_per_pack) + " in a pack, and an item in at most " +
          std::to_string(most_degree) + " packs");
    }
    return best;
  }

  const ItemProblem& problem;
  const ItemCost& cost;
  int32_t num_ranks;
  double pack_s_per_patch;
  std::vector<Item> order;  // longest first
  double total_speed = 0;
  double top_speed = 0;
  int64_t most_degree = 1;
  double total_s = 0;
  double even_s = 0;   // of the rank that is free first, where all work is even
  double bound_s = 0;  // of the makespan

 private:
  // When all work is done if it can be spread as sand over the ranks once they are free.
  double even_end_s() const {
    if (problem.busy_s.empty()) return total_s / total_speed;
    std::vector<std::pair<double, double>> ranks;  // (busy, speed)
    for (std::size_t i = 0; i < problem.busy_s.size(); ++i) {
      ranks.emplace_back(problem.busy_s[i], problem.speeds[i]);
    }
    std::sort(ranks.begin(), ranks.end());
    double speed = 0;
    double done_s = total_s;  // with the speed-weighted time that these ranks are busy
    for (const auto& [busy_s, of_rank] : ranks) {
      if (speed > 0 && done_s / speed <= busy_s) break;
      speed += of_rank;
      done_s += of_rank * busy_s;
    }
    return done_s / speed;
  }

  // By rows, of which there are few different numbers: each has its place at once.
  void sort() {
    const std::size_t count = problem.patches.size();
    const auto rows = [&](int64_t patches) {
      return static_cast<std::size_t>(patches / problem.patches_per_row);
    };
    const auto item = [&](std::size_t i) {
      const int32_t consumer = problem.consumers.empty() ? 0 : problem.consumers[i];
      return Item{problem.patches[i], static_cast<int32_t>(i), consumer};
    };
    order.resize(count);
    const auto largest = std::max_element(problem.patches.begin(), problem.patches.end());
    const std::size_t most = count == 0 ? 0 : rows(*largest);
    if (most > kMostCounted) {
      for (std::size_t i = 0; i < count; ++i) order[i] = item(i);
      std::stable_sort(order.begin(), order.end(),
                       [](const Item& a, const Item& b) { return a.patches > b.patches; });
      return;
    }
    std::vector<std::size_t> places(most + 2, 0);  // of each number of rows: items that have more
    for (const int64_t patches : problem.patches) ++places[most - rows(patches) + 1];
    std::partial_sum(places.begin(), places.end(), places.begin());
    for (std::size_t i = 0; i < count; ++i) {
      order[places[most - rows(problem.patches[i])]++] = item(i);
    }
  }
};

struct Attempt {
  double cut_share = 1;     // of an even load: items that take longer are cut
  double near_share = 0;    // those that take no longer stay in their consumer's node
  std::size_t num_cut = 0;  // so many of the longest are cut whatever they take
};

// What a rank's calls of the encoder hold so far.
struct Packs {
  int32_t number = 0;
  int64_t filled = 0;   // patches of the last one
  int64_t patches = 0;  // of all
};

class Placing {
 public:
  explicit Placing(const Items& items) : items_(items), done_(items.problem.busy_s) {
    done_.resize(items.problem.speeds.size(), 0.0);
    const std::size_t count = items.problem.patches.size();
    for (const double speed : items.problem.speeds) seconds_.push_back(1 / speed);
    plan_.first_ranks.resize(count);
    plan_.degrees.assign(count, 1);
    plan_.turns.assign(count, 0);
  }

  ItemPlan run(const Attempt& attempt) {
    place_whole(place_cut(attempt), attempt.near_share * items_.even_s);
    plan_.makespan_s = last_s();
    return std::move(plan_);
  }

 private:
  // When the last of the ranks is done that encode.
  double last_s() const {
    const std::vector<double>& busy_s = problem().busy_s;
    double last_s = 0;
    for (std::size_t rank = 0; rank < done_.size(); ++rank) {
      if (busy_s.empty() || done_[rank] > busy_s[rank]) last_s = std::max(last_s, done_[rank]);
    }
    return last_s;
  }

  const ItemProblem& problem() const { return items_.problem; }

  int32_t& degree(const Item& item) { return plan_.degrees[static_cast<std::size_t>(item.number)]; }

  void put(const Item& item, int32_t first_rank, int32_t turn) {
    const auto at = static_cast<std::size_t>(item.number);
    plan_.first_ranks[at] = first_rank;
    plan_.turns[at] = turn;
  }

  // Those of many ranks first: no smaller group then waits within a larger one. Returns the others.
  std::vector<Item> place_cut(const Attempt& attempt) {
    std::vector<Item> cut, whole;
    const double limit_s = attempt.cut_share * items_.even_s * items_.top_speed;
    for (const Item& item : items_.order) {
      const bool is_of_remainder = cut.size() < attempt.num_cut;
      const bool may_be_whole = item.patches <= problem().patches_per_pack && !is_of_remainder;
      if (!may_be_whole || items_.whole_s(item.patches) > limit_s) {
        degree(item) = static_cast<int32_t>(
            items_.best_degree(item.patches, is_of_remainder ? 0 : limit_s));
      }
      (degree(item) > 1 ? cut : whole).push_back(item);
    }
    std::stable_sort(cut.begin(), cut.end(),
                     [&](const Item& a, const Item& b) { return degree(a) > degree(b); });
    int32_t turn = 0;
    for (auto item = cut.begin(); item != cut.end();) {
      const int32_t ranks = degree(*item);
      Units groups(problem(), done_, ranks);
      for (; item != cut.end() && degree(*item) == ranks; ++item) {
        const double takes = items_.cut_s(item->patches, ranks);
        put(*item, groups.run(groups.first_with(takes), takes), turn++);
      }
    }
    return whole;
  }

  // Packs are filled in the order in which items are placed. Until all are, a pack counts by the
  // patches in it.
  void place_whole(const std::vector<Item>& whole, double longest_near_s) {
    Units ranks(problem(), done_, 1);
    const double limit_s = std::max(items_.bound_s * kFull, last_s());
    std::vector<Packs> packs(done_.size());
    for (const Item& item : whole) {
      const double takes = items_.whole_s(item.patches);
      int32_t rank = takes <= longest_near_s ? rank_near(item.consumer, takes, limit_s) : -1;
      if (rank < 0) rank = static_cast<int32_t>(ranks.first_with(takes));
      ranks.run(static_cast<std::size_t>(rank), takes);
      Packs& of_rank = packs[static_cast<std::size_t>(rank)];
      if (of_rank.number == 0 || of_rank.filled + item.patches > problem().patches_per_pack) {
        ++of_rank.number;
        of_rank.filled = 0;
      }
      of_rank.filled += item.patches;
      of_rank.patches += item.patches;
      put(item, rank, of_rank.number - 1);
    }
    for (std::size_t rank = 0; rank < packs.size(); ++rank) {
      const double calls_s = items_.cost.pack_s * packs[rank].number;
      const double counted_s = items_.pack_s_per_patch * static_cast<double>(packs[rank].patches);
      done_[rank] += (calls_s - counted_s) / problem().speeds[rank];
    }
  }

  // The rank of the consumer's node that would be done first with it; -1 if that is too late.
  int32_t rank_near(int32_t consumer, double takes, double limit_s) const {
    const auto per_node = static_cast<int32_t>(problem().ranks_per_node);
    const int32_t node = consumer / per_node * per_node;
    double earliest = limit_s;
    int32_t best = -1;
    for (int32_t rank = node; rank < std::min(node + per_node, items_.num_ranks); ++rank) {
      const auto at = static_cast<std::size_t>(rank);
      const double ends = done_[at] + takes * seconds_[at];
      if (ends < earliest) {
        earliest = ends;
        best = rank;
      }
    }
    return best;
  }

  const Items& items_;
  std::vector<double> done_;     // of each rank: when
  std::vector<double> seconds_;  // of each rank: for one at speed 1
  ItemPlan plan_;
};

}  // namespace

ItemPlan plan_items(const ItemProblem& problem) {
  check(problem);
  const Items items(problem);
  const double good_s = items.bound_s * kGoodEnough;
  const auto with = [&](Attempt attempt, double near_share) {
    attempt.near_share = problem.consumers.empty() ? 0 : near_share;
    return Placing(items).run(attempt);
  };
  ItemPlan best = with({}, kNearShares[0]);
  if (best.makespan_s <= good_s) return best;
  best.makespan_s = kInfinity;
  Attempt chosen;
  // Of items of one size: as many whole as give all ranks equally many, and the others cut.
  std::vector<Attempt> attempts{{1, 0, problem.patches.size() % problem.speeds.size()}};
  for (const double cut_share : kCutShares) attempts.push_back({cut_share, 0, 0});
  for (const Attempt& attempt : attempts) {
    if (best.makespan_s <= good_s) break;
    ItemPlan plan = with(attempt, 0);
    if (plan.makespan_s >= best.makespan_s) continue;
    best = std::move(plan);
    chosen = attempt;
  }
  for (const double near_share : kNearShares) {
    ItemPlan plan = with(chosen, near_share);
    if (plan.makespan_s <= std::max(best.makespan_s * kNearIsWorth, good_s)) return plan;
  }
  return best;
}

}  // namespace hdp
