#include "planner/ep_balance/filling.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "planner/base/cost_model.hpp"

namespace hdp {
namespace {

// The part of the capacity that a position is to fill: whole sequences never fill it all.
constexpr double kFull = 0.97;

// Heights that are tried, in parts of the one that the longest sequences fill.
constexpr std::array<double, 5> kHeights{0.94, 0.88, 0.8, 0.7, 0.55};

// Heights at which the longest sequence fills its ranks are tried up to so much above that.
constexpr double kTallest = 1.35;
constexpr double kLowest = 0.5;
constexpr int64_t kMostHeights = 5;

// A cell is full with less than this part of its work missing.
constexpr double kGap = 1e-3;

// A sequence may be this part longer than its ranks.
constexpr double kOver = 0.01;

constexpr int64_t kAnyTokens = std::numeric_limits<int64_t>::max();

int64_t greatest_cell(const Problem& problem, int64_t room, int64_t size) {
  const int64_t most = greatest_hidden_degree(problem.cost, room, size);
  const int64_t within = std::gcd(size, problem.cost.ranks_per_node);
  int64_t found = 1;
  for (int64_t width = 1; width <= std::min(most, size); ++width) {
    if (width <= within ? within % width == 0 : size % width == 0 && width % within == 0) {
      found = width;
    }
  }
  return found;
}

double per_rank(const OpenCell& cell) { return cell.work_s / static_cast<double>(cell.num_ranks); }

}  // namespace

Filling::Filling(const Problem& dense, const Items& items)
    : problem_(dense),
      items_(items),
      size_(dense.expert_ranks),
      room_(std::max<int64_t>(1, ring_room(dense))) {
  cell_size_ = greatest_cell(dense, room_, size_);
}

void Filling::start() {
  left_ = PlaceSet(items_.size());
  for (std::size_t place = 0; place < items_.size(); ++place) left_.insert(place);
}

Aim Filling::aim() const {
  const double full = kFull * static_cast<double>(problem_.tokens_per_rank);
  const bool one_cell = cell_size_ == size_;
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

std::vector<double> Filling::heights(const Aim& found) const {
  const Item& longest = items_[left_.next(0)];
  const double least_s = longest.dense_s / size();
  std::vector<double> result;
  const auto add = [&](double height_s) {
    const bool is_known = (!found.is_last && height_s == found.height_s) ||
                          std::find(result.begin(), result.end(), height_s) != result.end();
    if (!is_known) result.push_back(height_s);
  };
  const int64_t least = width_of(longest, kTallest * found.height_s);
  const int64_t most = std::min(size_, width_of(longest, kLowest * found.height_s));
  const int64_t step = std::max<int64_t>(1, (most - least) / kMostHeights);
  for (int64_t width = least; width <= most && least > 1; width += step) {
    add(longest.dense_s / static_cast<double>(width));
  }
  for (const double part : kHeights) add(std::max(least_s, part * found.height_s));
  return result;
}

void Filling::draft(const Aim& aim, Draft& draft) {
  draft.cells.clear();
  draft.places.clear();
  for (int64_t first = 0; first < size_;) {
    OpenCell cell;
    cell.first = first;
    cell.begin = draft.places.size();
    const bool is_open = open(cell, aim, draft.places);
    first += cell.num_ranks;
    if (!is_open) continue;
    if (!aim.is_last) fill(cell, aim, draft.places);
    cell.end = draft.places.size();
    draft.cells.push_back(cell);
  }
  if (aim.is_last) level(draft);
  for (const std::size_t place : draft.places) left_.insert(place);
  draft.longest_s = 0;
  draft.work_s = 0;
  for (const OpenCell& cell : draft.cells) {
    const double own_s = cell.done_s / static_cast<double>(cell.num_ranks);
    draft.longest_s = std::max(draft.longest_s, own_s + std::max(0.0, -cell.hidden_s));
    draft.work_s += cell.done_s;
  }
  draft.waste = 1 - draft.work_s / (size() * draft.longest_s);
}

// With the longest sequence that fits, if one does: on as many ranks as it needs, if these are more
// than a cell's, else on the rest of the cell's.
bool Filling::open(OpenCell& cell, const Aim& aim, Places& places) {
  const int64_t ranks_left = size_ - cell.first;
  const int64_t rest = cell_size_ - cell.first % cell_size_;
  cell.num_ranks = rest;
  const double most_s = aim.height_s * (1 + kOver) * static_cast<double>(ranks_left);
  std::size_t place = left_.next(first_within(left_.next(0), most_s, kAnyTokens));
  while (place < items_.size()) {
    const int64_t width = width_of(items_[place], aim.height_s);
    if (width <= rest || (width > cell_size_ && width <= ranks_left)) {
      cell.num_ranks = std::max(width, rest);
      cell.work_s = aim.height_s * static_cast<double>(cell.num_ranks);
      cell.tokens = cell.num_ranks * problem_.tokens_per_rank;
      add(cell, place);
      places.push_back(place);
      return true;
    }
    place = left_.next(next_length(place));
  }
  return false;
}

// With the longest that fit.
void Filling::fill(OpenCell& cell, const Aim& aim, Places& places) {
  const double enough_s = kGap * aim.height_s * static_cast<double>(cell.num_ranks);
  std::size_t place = left_.next(0);
  while (cell.work_s > enough_s && cell.tokens > 0) {
    place = left_.next(first_within(place, cell.work_s, cell.tokens));
    if (place >= items_.size()) return;
    if (may_join(cell, items_[place])) {
      add(cell, place);
      places.push_back(place);
    } else {
      place = next_length(place);
    }
  }
}

// What is left goes where most is missing, the longest first.
void Filling::level(Draft& draft) {
  std::vector<OpenCell>& cells = draft.cells;
  cells_.resize(cells.size());  // that open with one sequence each
  std::iota(cells_.begin(), cells_.end(), std::size_t{0});
  missing_s_.clear();
  for (const OpenCell& cell : cells) missing_s_.push_back(per_rank(cell));
  for (std::size_t place = left_.next(0); place < items_.size(); place = left_.next(place + 1)) {
    std::size_t most = cells.size();
    for (std::size_t i = 0; i < cells.size(); ++i) {
      if (most < cells.size() && missing_s_[i] <= missing_s_[most]) continue;
      if (may_join(cells[i], items_[place])) most = i;
    }
    if (most == cells.size()) continue;
    add(cells[most], place);
    missing_s_[most] = per_rank(cells[most]);
    ++cells[most].end;
    draft.places.push_back(place);
    cells_.push_back(most);
  }
  std::size_t begin = 0;
  for (OpenCell& cell : cells) {
    const std::size_t num = cell.end - cell.begin;
    cell.begin = cell.end = begin;
    begin += num;
  }
  by_cell_.resize(draft.places.size());
  for (std::size_t i = 0; i < cells_.size(); ++i) {
    by_cell_[cells[cells_[i]].end++] = draft.places[i];
  }
  draft.places.swap(by_cell_);
}

void Filling::add(OpenCell& cell, std::size_t place) {
  const Item& item = items_[place];
  cell.work_s -= item.dense_s;
  cell.done_s += item.dense_s;
  cell.tokens -= item.tokens;
  if (!is_whole(item)) cell.hidden_s += hidden_s(item, cell.num_ranks);
  left_.erase(place);
}

bool Filling::may_join(const OpenCell& cell, const Item& item) const {
  if (item.tokens > cell.tokens) return false;
  if (is_whole(item)) return true;
  if (item.length > room_ * cell.num_ranks) return false;
  if (cell.num_ranks <= cell_size_) return cell.num_ranks > 1;
  return cell.hidden_s + hidden_s(item, cell.num_ranks) >= 0;
}

// Ranks that the sequence needs.
int64_t Filling::width_of(const Item& item, double height_s) const {
  const double ranks = std::ceil(item.dense_s / height_s * (1 - kOver));
  const auto width = std::max<int64_t>(1, static_cast<int64_t>(std::min(ranks, size())));
  return is_whole(item) ? width : std::max({width, int64_t{2}, (item.length + room_ - 1) / room_});
}

// Attention of a sequence that is more than what hides its traffic in a ring.
double Filling::hidden_s(const Item& item, int64_t degree) const {
  const auto d = static_cast<double>(degree);
  const bool one_node = degree <= cell_size_ && degree <= problem_.cost.ranks_per_node;
  const auto tokens = static_cast<double>(item.length);
  return (d - 1) / d * attention_s(problem_.cost, item.length) / d -
         transfer_s(problem_.cost, degree, tokens, one_node);
}

// The first place from `place` on whose sequence takes at most so long and so many tokens.
std::size_t Filling::first_within(std::size_t place, double seconds, int64_t tokens) const {
  const auto is_above = [&](const Item& item) {
    return item.dense_s > seconds || item.tokens > tokens;
  };
  std::size_t step = 1;  // it is near where much is missing
  while (place + step <= items_.size() && is_above(items_[place + step - 1])) {
    place += step;
    step *= 2;
  }
  const auto at = [&](std::size_t i) { return items_.begin() + static_cast<std::ptrdiff_t>(i); };
  const auto end = at(std::min(items_.size(), place + step - 1));
  return static_cast<std::size_t>(std::partition_point(at(place), end, is_above) -
                                  items_.begin());
}

// The first place with a shorter sequence.
std::size_t Filling::next_length(std::size_t place) const {
  const int64_t length = items_[place].length;
  const auto found = std::partition_point(
      items_.begin() + static_cast<std::ptrdiff_t>(place), items_.end(),
      [&](const Item& item) { return item.length >= length; });
  return static_cast<std::size_t>(found - items_.begin());
}

}  // namespace hdp
