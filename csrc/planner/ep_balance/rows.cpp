#include "planner/ep_balance/rows.hpp"

#include <algorithm>
#include <utility>

namespace hdp {
namespace {

// The most rows that are worked out besides the first.
constexpr std::size_t kMostRows = 3;

// A row that wastes no more of its time is good enough; the last one may waste more, since what it
// leaves would need another.
constexpr double kLittle = 0.008;
constexpr double kLittleAtLast = 0.02;

}  // namespace

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
    const auto begin = row.places.begin() + static_cast<std::ptrdiff_t>(open.begin);
    const auto end = row.places.begin() + static_cast<std::ptrdiff_t>(open.end);
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

}  // namespace hdp
