#include "planner/ep_balance/rows.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "planner/base/cost_model.hpp"
#include "planner/schedule/ways.hpp"

namespace hdp {
namespace {

// The part of the capacity that a slot is to fill: whole sequences never fill it all.
constexpr double kFull = 0.97;

// Heights that are tried, in parts of the one that the longest sequences fill.
constexpr std::array<double, 5> kHeights{0.94, 0.88, 0.8, 0.7, 0.55};

// Heights at which the longest sequence fills its ranks are tried up to so much above that.
constexpr double kTallest = 1.35;
constexpr double kLowest = 0.5;
constexpr int64_t kMostHeights = 5;

// A group is full with less than this part of its work missing.
constexpr double kGap = 1e-3;

// A sequence may be this part longer than its ranks.
constexpr double kOver = 0.01;

constexpr int64_t kAnyTokens = std::numeric_limits<int64_t>::max();

// Whether groups of this width tile a domain of `size` ranks, of which `within` are side by side in
// a node: some fill what is in the node, or one is made of several such parts.
bool tiles(int64_t width, int64_t within, int64_t size) {
  if (width <= within) return within % width == 0;
  return size % width == 0 && width % within == 0;
}

int64_t largest_group(const Problem& problem, int64_t room, int64_t size) {
  const int64_t most = greatest_hidden_degree(problem.cost, room, size);
  const int64_t within = std::gcd(size, problem.cost.ranks_per_node);
  int64_t found = 1;
  for (int64_t width = 1; width <= std::min(most, size); ++width) {
    if (tiles(width, within, size)) found = width;
  }
  return found;
}

// The most rows that are worked out besides the first.
constexpr std::size_t kMostRows = 3;

// A row that wastes no more of its time is good enough; the last one may waste more, since what it
// leaves would need another.
constexpr double kLittle = 0.008;
constexpr double kLittleAtLast = 0.02;

double per_rank(const OpenGroup& group) {
  return group.work_s / static_cast<double>(group.num_ranks);
}

// Numbers of micro-batches by position.
std::vector<int32_t> by_position(const std::vector<int32_t>& positions) {
  if (positions.empty()) return {};
  const int32_t last = *std::max_element(positions.begin(), positions.end());
  std::vector<std::size_t> starts(index(last) + 2, 0);
  for (const int32_t position : positions) ++starts[index(position) + 1];
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  std::vector<int32_t> order(positions.size());
  for (std::size_t m = 0; m < positions.size(); ++m) {
    order[starts[index(positions[m])]++] = static_cast<int32_t>(m);
  }
  return order;
}

}  // namespace

SlotFiller::SlotFiller(const Problem& dense, const Items& items)
    : problem_(dense),
      items_(items),
      size_(dense.expert_ranks),
      room_(std::max<int64_t>(1, ring_room(dense))) {
  group_size_ = largest_group(dense, room_, size_);
}

Target SlotFiller::target() const {
  const double full = kFull * static_cast<double>(problem_.tokens_per_rank);
  const bool one_group = group_size_ == size_;
  double work_s = 0;
  double tokens = 0;
  const std::size_t longest = left_.next(0);
  const double least_s = items_[longest].dense_s / size();
  for (std::size_t place = longest; place < items_.size(); place = left_.next(place + 1)) {
    const Item& item = items_[place];
    const auto length = static_cast<double>(item.length);
    const double height_s = (work_s + item.dense_s) / size();
    const bool fits = tokens + length <= size() * full &&
                      (one_group || height_s <= std::max(least_s, item.dense_s / length * full));
    if (!fits) return {std::max(least_s, work_s / size()), false};
    work_s += item.dense_s;
    tokens += length;
  }
  return {std::max(least_s, work_s / size()), true};
}

std::vector<double> SlotFiller::heights(const Target& found) const {
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

void SlotFiller::draft(const Target& target, Draft& draft) {
  draft.groups.clear();
  draft.places.clear();
  for (int64_t first = 0; first < size_;) {
    OpenGroup group;
    group.first = first;
    group.begin = draft.places.size();
    const bool is_open = open(group, target, draft.places);
    first += group.num_ranks;
    if (!is_open) continue;
    if (!target.is_last) fill(group, target, draft.places);
    group.end = draft.places.size();
    draft.groups.push_back(group);
  }
  if (target.is_last) level(draft);
  for (const std::size_t place : draft.places) left_.insert(place);
  draft.longest_s = 0;
  draft.work_s = 0;
  for (const OpenGroup& group : draft.groups) {
    const double own_s = group.done_s / static_cast<double>(group.num_ranks);
    draft.longest_s = std::max(draft.longest_s, own_s + std::max(0.0, -group.hidden_s));
    draft.work_s += group.done_s;
  }
  draft.waste = 1 - draft.work_s / (size() * draft.longest_s);
}

// With the longest sequence that fits, if one does: on as many ranks as it needs, if these are more
// than a group's, else on the rest of the group's.
bool SlotFiller::open(OpenGroup& group, const Target& target, Places& places) {
  const int64_t ranks_left = size_ - group.first;
  const int64_t rest = group_size_ - group.first % group_size_;
  group.num_ranks = rest;
  const double most_s = target.height_s * (1 + kOver) * static_cast<double>(ranks_left);
  std::size_t place = left_.next(first_within(left_.next(0), most_s, kAnyTokens));
  while (place < items_.size()) {
    const int64_t width = width_of(items_[place], target.height_s);
    if (width <= rest || (width > group_size_ && width <= ranks_left)) {
      group.num_ranks = std::max(width, rest);
      group.work_s = target.height_s * static_cast<double>(group.num_ranks);
      group.tokens = group.num_ranks * problem_.tokens_per_rank;
      add(group, place);
      places.push_back(place);
      return true;
    }
    place = left_.next(next_length(place));
  }
  return false;
}

// With the longest that fit.
void SlotFiller::fill(OpenGroup& group, const Target& target, Places& places) {
  const double enough_s = kGap * target.height_s * static_cast<double>(group.num_ranks);
  std::size_t place = left_.next(0);
  while (group.work_s > enough_s && group.tokens > 0) {
    place = left_.next(first_within(place, group.work_s, group.tokens));
    if (place >= items_.size()) return;
    if (may_join(group, items_[place])) {
      add(group, place);
      places.push_back(place);
    } else {
      place = next_length(place);
    }
  }
}

// What is left goes where most is missing, the longest first.
void SlotFiller::level(Draft& draft) {
  std::vector<OpenGroup>& groups = draft.groups;
  groups_.resize(groups.size());  // that open with one sequence each
  std::iota(groups_.begin(), groups_.end(), std::size_t{0});
  missing_s_.clear();
  for (const OpenGroup& group : groups) missing_s_.push_back(per_rank(group));
  for (std::size_t place = left_.next(0); place < items_.size(); place = left_.next(place + 1)) {
    std::size_t most = groups.size();
    for (std::size_t i = 0; i < groups.size(); ++i) {
      if (most < groups.size() && missing_s_[i] <= missing_s_[most]) continue;
      if (may_join(groups[i], items_[place])) most = i;
    }
    if (most == groups.size()) continue;
    add(groups[most], place);
    missing_s_[most] = per_rank(groups[most]);
    ++groups[most].end;
    draft.places.push_back(place);
    groups_.push_back(most);
  }
  std::size_t begin = 0;
  for (OpenGroup& group : groups) {
    const std::size_t num = group.end - group.begin;
    group.begin = group.end = begin;
    begin += num;
  }
  by_group_.resize(draft.places.size());
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    by_group_[groups[groups_[i]].end++] = draft.places[i];
  }
  draft.places.swap(by_group_);
}

void SlotFiller::add(OpenGroup& group, std::size_t place) {
  const Item& item = items_[place];
  group.work_s -= item.dense_s;
  group.done_s += item.dense_s;
  group.tokens -= item.tokens;
  if (!is_whole(item)) group.hidden_s += hidden_s(item, group.num_ranks);
  left_.erase(place);
}

bool SlotFiller::may_join(const OpenGroup& group, const Item& item) const {
  if (item.tokens > group.tokens) return false;
  if (is_whole(item)) return true;
  if (item.length > room_ * group.num_ranks) return false;
  if (group.num_ranks <= group_size_) return group.num_ranks > 1;
  return group.hidden_s + hidden_s(item, group.num_ranks) >= 0;
}

// Ranks that the sequence needs.
int64_t SlotFiller::width_of(const Item& item, double height_s) const {
  const double ranks = std::ceil(item.dense_s / height_s * (1 - kOver));
  const auto width = std::max<int64_t>(1, static_cast<int64_t>(std::min(ranks, size())));
  return is_whole(item) ? width : std::max({width, int64_t{2}, (item.length + room_ - 1) / room_});
}

// Attention of a sequence that is more than what hides its traffic in a ring.
double SlotFiller::hidden_s(const Item& item, int64_t degree) const {
  const auto d = static_cast<double>(degree);
  const CostModel& cost = problem_.cost;
  const Links links = degree <= group_size_
                          ? likely_links(cost, degree)
                          : links_between_nodes(cost, std::gcd(degree, cost.ranks_per_node));
  const auto tokens = static_cast<double>(item.length);
  return (d - 1) / d * attention_s(problem_.cost, item.length) / d -
         transfer_s(problem_.cost, degree, tokens, links);
}

// The first place from `place` on whose sequence takes at most so long and so many tokens.
std::size_t SlotFiller::first_within(std::size_t place, double seconds, int64_t tokens) const {
  const auto is_above = [&](const Item& item) {
    return item.dense_s > seconds || item.tokens > tokens;
  };
  std::size_t step = 1;  // it is near where much is missing
  while (place + step <= items_.size() && is_above(items_[place + step - 1])) {
    place += step;
    step *= 2;
  }
  const auto end = at(items_, std::min(items_.size(), place + step - 1));
  return index(std::partition_point(at(items_, place), end, is_above) - items_.begin());
}

// The first place with a shorter sequence.
std::size_t SlotFiller::next_length(std::size_t place) const {
  const int64_t length = items_[place].length;
  const auto found = std::partition_point(at(items_, place), items_.end(),
                                          [&](const Item& item) { return item.length >= length; });
  return index(found - items_.begin());
}

const Row* Rows::next() {
  if (filler_.is_empty()) return nullptr;
  const Target found = filler_.target();
  if (drafts_.empty()) drafts_.resize(1);
  filler_.draft(found, drafts_[0]);
  share(drafts_[0], best_, 1);
  least_waste_ = wasted(best_);
  if (least_waste_ > (found.is_last ? kLittleAtLast : kLittle)) try_heights(found);
  for (std::size_t i = 0; i < best_.places.size(); ++i) {
    if (best_.owners[i] != kLeft) filler_.take(best_.places[i]);
  }
  return &best_;
}

// Other heights may lose less than the greatest; of the most promising ones, what is really lost
// decides.
void Rows::try_heights(const Target& found) {
  const std::vector<double> heights = filler_.heights(found);
  if (drafts_.size() < heights.size()) drafts_.resize(heights.size());
  order_.clear();
  for (std::size_t i = 0; i < heights.size(); ++i) {
    filler_.draft({heights[i], false}, drafts_[i]);
    order_.emplace_back(drafts_[i].waste, i);
  }
  std::sort(order_.begin(), order_.end());
  for (std::size_t i = 0; i < order_.size() && i < kMostRows; ++i) {
    const auto& [least, draft] = order_[i];
    if (least_waste_ <= std::max(kLittle, least)) return;
    share(drafts_[draft], row_, least_waste_);
    const double waste = wasted(row_);
    if (waste >= least_waste_) continue;
    std::swap(best_, row_);
    least_waste_ = waste;
  }
}

// The groups as ranks run them, if no more than `most` is wasted, or else none. What finds no room
// stays for later rows.
void Rows::share(Draft& draft, Row& row, double most) {
  row.groups.clear();
  row.places.swap(draft.places);
  row.owners.resize(row.places.size());
  double longest_s = 0;
  for (const OpenGroup& open : draft.groups) {
    RankGroup group;
    group.first = first_ + static_cast<int32_t>(open.first);
    group.num_ranks = open.num_ranks;
    group.begin = open.begin;
    group.end = open.end;
    const auto begin = at(row.places, open.begin);
    const auto end = at(row.places, open.end);
    if (!std::is_sorted(begin, end)) std::sort(begin, end);
    sharing_.share(row, group, std::max(longest_s, draft.longest_s));
    row.groups.push_back(group);
    longest_s = std::max(longest_s, group.seconds);
    if (1 - draft.work_s / (size_ * longest_s) > most) {
      row.groups.clear();
      return;
    }
  }
}

// The part of the row's time.
double Rows::wasted(const Row& row) const {
  double longest_s = 0;
  double work_s = 0;
  for (const RankGroup& group : row.groups) {
    longest_s = std::max(longest_s, group.seconds);
    work_s += group.dense_s;
  }
  return work_s > 0 ? 1 - work_s / (size_ * longest_s) : 1;
}

void MicroBatches::add(int32_t position, const std::vector<int32_t>& ranks,
                       const std::vector<SequenceId>& sequences, double offload_ratio) {
  made_.add(ranks, sequences, offload_ratio);
  made_.positions.push_back(position);
}

void MicroBatches::add_alone(int32_t position, const Problem& problem,
                             const std::vector<int32_t>& ranks, SequenceId sequence) {
  add_sequence(problem, ranks, sequence, made_);
  made_.positions.push_back(position);
}

// A ring, or else a micro-batch of each rank that has sequences.
void MicroBatches::add(int32_t position, const Row& row, const RankGroup& group,
                       const Items& items) {
  sequences_.clear();
  ends_.assign(index(group.num_ranks) + 1, 0);
  for (std::size_t i = group.begin; i < group.end; ++i) {
    if (row.owners[i] >= 0) ++ends_[index(row.owners[i]) + 1];
    if (row.owners[i] == kSharded) sequences_.push_back(items[row.places[i]].id);
  }
  std::partial_sum(ends_.begin(), ends_.end(), ends_.begin());
  locals_.resize(index(ends_.back()));
  for (std::size_t i = group.begin; i < group.end; ++i) {
    if (row.owners[i] < 0) continue;
    locals_[index(ends_[index(row.owners[i])]++)] = items[row.places[i]].id;
  }
  const bool is_ring = !sequences_.empty();
  if (is_ring) {
    ranks_.resize(index(group.num_ranks));
    std::iota(ranks_.begin(), ranks_.end(), group.first);
    add(position, ranks_, sequences_, 0);
    made_.locals.sequences.insert(made_.locals.sequences.end(), locals_.begin(), locals_.end());
  }
  int32_t begin = 0;
  for (int32_t rank = 0; rank < group.num_ranks; ++rank) {
    const int32_t end = ends_[index(rank)];
    const auto num = index(end - begin);
    if (is_ring) {
      made_.locals.ranks.insert(made_.locals.ranks.end(), num, group.first + rank);
    } else if (num > 0) {
      ranks_.assign(1, group.first + rank);
      sequences_.assign(locals_.begin() + begin, locals_.begin() + end);
      add(position, ranks_, sequences_, 0);
    }
    begin = end;
  }
  made_.end_locals(made_.locals.sequences.size());
}

Plan MicroBatches::sorted() const {
  Plan plan;
  plan.reserve(index(made_.num_micro_batches()), made_.ranks.size(), made_.sequences.size());
  plan.positions.reserve(made_.positions.size());
  std::vector<int32_t> ranks;
  std::vector<SequenceId> sequences;
  for (const int32_t m : by_position(made_.positions)) {
    ranks.assign(made_.ring(m).first, made_.ring(m).last);
    sequences.assign(made_.sharded(m).first, made_.sharded(m).last);
    plan.add(ranks, sequences, made_.offload_ratio(m));
    if (made_.parts_of_stream(m) > 0) plan.stream_last(made_.parts_of_stream(m));
    const Locals& locals = made_.locals;
    const int32_t first = made_.local_offset(m);
    const int32_t last = made_.local_offset(m + 1);
    plan.locals.ranks.insert(plan.locals.ranks.end(), locals.ranks.begin() + first,
                             locals.ranks.begin() + last);
    plan.locals.sequences.insert(plan.locals.sequences.end(), locals.sequences.begin() + first,
                                 locals.sequences.begin() + last);
    plan.end_locals(plan.locals.sequences.size());
    plan.positions.push_back(made_.positions[index(m)]);
  }
  return plan;
}

}  // namespace hdp
