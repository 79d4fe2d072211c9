#include "planner/ep_balance/rows.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "planner/base/cost_model.hpp"
#include "planner/base/slices.hpp"
#include "planner/rings/place_set.hpp"

namespace hdp {

namespace {

// The part of the capacity that a row is to fill: whole sequences never fill it all.
constexpr double kFull = 0.97;

// Heights of a row that are tried, in parts of the one that its sequences fill.
constexpr std::array<double, 5> kHeights{0.94, 0.88, 0.8, 0.7, 0.55};

// Heights at which the longest sequence fills its ranks are tried up to so much above that.
constexpr double kTallest = 1.35;
constexpr double kLowest = 0.5;
constexpr int64_t kMostHeights = 5;

// The most of them that are worked out.
constexpr std::size_t kMostRows = 3;

// A row that wastes no more of its time is good enough; the last one may waste more, since what it
// leaves would need another.
constexpr double kLittle = 0.008;
constexpr double kLittleAtLast = 0.02;

// A cell is full with less than this part of its work missing.
constexpr double kGap = 1e-3;

// A sequence may be this part longer than its ranks.
constexpr double kOver = 0.01;

int64_t greatest_cell(const Problem& problem, int64_t size) {
  const int64_t most =
      greatest_hidden_degree(problem.cost, std::max<int64_t>(1, ring_room(problem)), size);
  const int64_t within = std::gcd(size, problem.cost.ranks_per_node);
  int64_t found = 1;
  for (int64_t width = 1; width <= std::min(most, size); ++width) {
    if (width <= within ? within % width == 0 : size % width == 0 && width % within == 0) {
      found = width;
    }
  }
  return found;
}

}  // namespace

class Dealer {
 public:
  Dealer(const Rows& rows, const Items& items)
      : problem_(rows.problem_),
        rows_(rows),
        items_(items),
        left_(items.size()),
        room_(std::max<int64_t>(1, ring_room(rows.problem_))) {
    for (std::size_t place = 0; place < items.size(); ++place) left_.insert(place);
  }

  std::vector<Row> run() {
    std::vector<Row> result;
    while (left_.next(0) < items_.size()) result.push_back(next_row());
    return result;
  }

 private:
  struct Aim {
    double height_s = 0;
    bool is_last = false;
  };

  double size() const { return static_cast<double>(rows_.size_); }

  // The greatest height to which the longest sequences left fill all ranks.
  Aim aim() const {
    const double full = kFull * static_cast<double>(problem_.tokens_per_rank);
    const bool one_cell = rows_.cell_size_ == rows_.size_;
    double work_s = 0;
    double tokens = 0;
    const std::size_t longest = left_.next(0);
    const double least_s = items_[longest].dense_s / size();
    for (std::size_t place = longest; place < items_.size(); place = left_.next(place + 1)) {
      const Item& item = items_[place];
      const auto length = static_cast<double>(item.length);
      const double height_s = (work_s + item.dense_s) / size();
      const bool fits = tokens + length <= size() * full &&
                        (one_cell || height_s <= std::max(least_s, item.dense_s / length * full));
      if (!fits) return {std::max(least_s, work_s / size()), false};
      work_s += item.dense_s;
      tokens += length;
    }
    return {std::max(least_s, work_s / size()), true};
  }

  // Other heights are tried if the greatest loses more than a little; of the most promising ones,
  // what is really lost decides.
  Row next_row() {
    const Aim found = aim();
    Trial first = trial(found);
    Row best = shared(first.cells);
    double least_waste = wasted(best);
    if (least_waste > (found.is_last ? kLittleAtLast : kLittle)) {
      std::vector<Trial> trials;
      for (const double height_s : heights(found.height_s)) {
        trials.push_back(trial({height_s, false}));
      }
      std::stable_sort(trials.begin(), trials.end(), [](const Trial& left, const Trial& right) {
        return left.waste < right.waste;
      });
      for (std::size_t i = 0; i < trials.size() && i < kMostRows; ++i) {
        if (least_waste <= std::max(kLittle, trials[i].waste)) break;
        Row row = shared(trials[i].cells);
        const double waste = wasted(row);
        if (waste >= least_waste) continue;
        best = std::move(row);
        least_waste = waste;
      }
    }
    for (const Cell& cell : best) {
      for (const std::size_t place : cell.sharded) left_.erase(place);
      for (const auto& local : cell.locals) left_.erase(local.second);
    }
    return best;
  }

  // Those at which the longest sequence fills its ranks, or else parts of the given one; the
  // greatest first.
  std::vector<double> heights(double height_s) const {
    const Item& longest = items_[left_.next(0)];
    const double least_s = longest.dense_s / size();
    std::vector<double> result;
    const int64_t least = width_of(longest, kTallest * height_s);
    const int64_t most = std::min(rows_.size_, width_of(longest, kLowest * height_s));
    const int64_t step = std::max<int64_t>(1, (most - least) / kMostHeights);
    for (int64_t width = least; width <= most && least > 1; width += step) {
      result.push_back(longest.dense_s / static_cast<double>(width));
    }
    for (const double part : kHeights) {
      result.push_back(std::max(least_s, part * height_s));
    }
    return result;
  }

  // Cells of a row that are being filled.
  struct Open {
    int64_t first = 0;  // rank of the domain
    int64_t num_ranks = 0;
    double work_s = 0;    // that is missing
    double done_s = 0;    // work of its sequences
    int64_t tokens = 0;   // that have room
    double hidden_s = 0;  // attention beyond what hides the ring's traffic
    Places places;
  };

  struct Trial {
    double waste = 0;  // if the ranks of each cell take the same time
    std::vector<Open> cells;
  };

  Trial trial(const Aim& aim) {
    std::vector<Open> cells = filled(aim);
    for (const Open& cell : cells) {
      for (const std::size_t place : cell.places) left_.insert(place);
    }
    const double waste = wasted(cells);
    return {waste, std::move(cells)};
  }

  // The cells' sequences are taken.
  std::vector<Open> filled(const Aim& aim) {
    std::vector<Open> opened;
    for (int64_t first = 0; first < rows_.size_;) {
      Open next = open(aim, first);
      first += next.num_ranks;
      if (next.places.empty()) continue;
      if (!aim.is_last) fill(next, aim);
      opened.push_back(std::move(next));
    }
    if (aim.is_last) level(opened);
    return opened;
  }

  // The part of the row's time that is lost if the ranks of each cell take the same time.
  double wasted(const std::vector<Open>& cells) const {
    double longest_s = 0;
    double work_s = 0;
    for (const Open& cell : cells) {
      const double own_s = cell.done_s / static_cast<double>(cell.num_ranks);
      longest_s = std::max(longest_s, own_s + std::max(0.0, -cell.hidden_s));
      work_s += cell.done_s;
    }
    return 1 - work_s / (size() * longest_s);
  }

  double wasted(const Row& row) const {
    double longest_s = 0;
    double work_s = 0;
    for (const Cell& cell : row) {
      longest_s = std::max(longest_s, cell.seconds);
      work_s += cell.dense_s;
    }
    return work_s > 0 ? 1 - work_s / (size() * longest_s) : 1;
  }

  // The cells as ranks run them; what finds no room stays for later rows.
  Row shared(std::vector<Open>& cells) {
    Row row;
    for (Open& cell : cells) {
      std::sort(cell.places.begin(), cell.places.end());
      row.push_back(shared_cell(problem_, items_, rows_.first_ + static_cast<int32_t>(cell.first),
                                cell.num_ranks, cell.places));
    }
    return row;
  }

  // A cell that begins with this rank of the domain, and with the longest sequence that fits: on as
  // many ranks as it needs, if these are more than a cell's, else on the rest of the cell's.
  Open open(const Aim& aim, int64_t first) {
    const int64_t ranks_left = rows_.size_ - first;
    const int64_t rest = rows_.cell_size_ - first % rows_.cell_size_;
    Open cell{first, rest, 0, 0, 0, 0, {}};
    std::size_t place = left_.next(first_within(
        aim.height_s * (1 + kOver) * static_cast<double>(ranks_left)));
    while (place < items_.size()) {
      const int64_t width = width_of(items_[place], aim.height_s);
      if (width <= rest || (width > rows_.cell_size_ && width <= ranks_left)) {
        cell.num_ranks = std::max(width, rest);
        cell.work_s = aim.height_s * static_cast<double>(cell.num_ranks);
        cell.tokens = cell.num_ranks * problem_.tokens_per_rank;
        add(cell, place);
        break;
      }
      place = left_.next(next_length(place));
    }
    return cell;
  }

  bool is_whole(const Item& item) const {
    return slice_tokens(item.length, 1, problem_.slice_multiple) <= problem_.tokens_per_rank;
  }

  // Ranks that the sequence needs.
  int64_t width_of(const Item& item, double height_s) const {
    const double ranks = std::ceil(item.dense_s / height_s * (1 - kOver));
    const auto width = std::max<int64_t>(1, static_cast<int64_t>(std::min(ranks, size())));
    return is_whole(item) ? width : std::max({width, int64_t{2}, (item.length + room_ - 1) / room_});
  }

  void add(Open& cell, std::size_t place) {
    const Item& item = items_[place];
    cell.work_s -= item.dense_s;
    cell.done_s += item.dense_s;
    cell.tokens -= slice_tokens(item.length, 1, problem_.slice_multiple);
    if (!is_whole(item)) cell.hidden_s += hidden_s(item, cell.num_ranks);
    cell.places.push_back(place);
    left_.erase(place);
  }

  // Attention of a sequence that is more than what hides its traffic in a ring.
  double hidden_s(const Item& item, int64_t degree) const {
    const auto d = static_cast<double>(degree);
    const bool one_node = degree <= rows_.cell_size_ && degree <= problem_.cost.ranks_per_node;
    const auto tokens = static_cast<double>(item.length);
    return (d - 1) / d * attention_s(problem_.cost, item.length) / d -
           transfer_s(problem_.cost, degree, tokens, one_node);
  }

  // The first place whose sequence takes at most so long.
  std::size_t first_within(double seconds) const {
    const auto found = std::partition_point(items_.begin(), items_.end(), [&](const Item& item) {
      return item.dense_s > seconds;
    });
    return static_cast<std::size_t>(found - items_.begin());
  }

  // With the longest that fit.
  void fill(Open& cell, const Aim& aim) {
    const double enough_s = kGap * aim.height_s * static_cast<double>(cell.num_ranks);
    std::size_t place = 0;
    while (cell.work_s > enough_s && cell.tokens > 0) {
      place = left_.next(std::max(place, first_within(cell.work_s)));
      if (place >= items_.size()) return;
      if (may_join(cell, items_[place])) {
        add(cell, place);
      } else {
        place = next_length(place);
      }
    }
  }

  bool may_join(const Open& cell, const Item& item) const {
    if (slice_tokens(item.length, 1, problem_.slice_multiple) > cell.tokens) return false;
    if (is_whole(item)) return true;
    if (item.length > room_ * cell.num_ranks) return false;
    if (cell.num_ranks <= rows_.cell_size_) return cell.num_ranks > 1;
    return cell.hidden_s + hidden_s(item, cell.num_ranks) >= 0;
  }

  // The first place with a shorter sequence.
  std::size_t next_length(std::size_t place) const {
    const int64_t length = items_[place].length;
    const auto found = std::partition_point(
        items_.begin() + static_cast<std::ptrdiff_t>(place), items_.end(),
        [&](const Item& item) { return item.length >= length; });
    return static_cast<std::size_t>(found - items_.begin());
  }

  // What is left goes where most is missing, the longest first.
  void level(std::vector<Open>& opened) {
    for (std::size_t place = left_.next(0); place < items_.size(); place = left_.next(place + 1)) {
      Open* most = nullptr;
      for (Open& cell : opened) {
        if (!may_join(cell, items_[place])) continue;
        if (most == nullptr || per_rank(cell) > per_rank(*most)) most = &cell;
      }
      if (most != nullptr) add(*most, place);
    }
  }

  static double per_rank(const Open& cell) {
    return cell.work_s / static_cast<double>(cell.num_ranks);
  }

  const Problem& problem_;
  const Rows& rows_;
  const Items& items_;
  PlaceSet left_;
  int64_t room_;  // of a rank for slices
};

Rows::Rows(const Problem& dense, int32_t first, int64_t size)
    : problem_(dense), first_(first), size_(size), cell_size_(greatest_cell(dense, size)) {}

std::vector<Row> Rows::deal(const Items& items) const { return Dealer(*this, items).run(); }

}  // namespace hdp
