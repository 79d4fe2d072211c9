#include "planner/ep_balance/rows.hpp"

#include <algorithm>
#include <utility>

#include "planner/ep_balance/filling.hpp"

namespace hdp {
namespace {

// The most rows that are worked out besides the first.
constexpr std::size_t kMostRows = 3;

// A row that wastes no more of its time is good enough; the last one may waste more, since what it
// leaves would need another.
constexpr double kLittle = 0.008;
constexpr double kLittleAtLast = 0.02;

class Dealer {
 public:
  Dealer(const Problem& dense, const Items& items, int32_t first, int64_t size)
      : first_(first), size_(size), filling_(dense, items, size), sharing_(dense, items) {}

  std::vector<Row> run() {
    std::vector<Row> result;
    while (!filling_.is_empty()) result.push_back(next_row());
    return result;
  }

 private:
  // Other heights are tried if the greatest loses more than a little; of the most promising ones,
  // what is really lost decides.
  Row next_row() {
    const Aim found = filling_.aim();
    Row best = shared(filling_.draft(found), 2);
    double least_waste = wasted(best);
    if (least_waste > (found.is_last ? kLittleAtLast : kLittle)) {
      std::vector<Draft> drafts;
      for (const double height_s : filling_.heights(found)) {
        drafts.push_back(filling_.draft({height_s, false}));
      }
      std::stable_sort(drafts.begin(), drafts.end(), [](const Draft& left, const Draft& right) {
        return left.waste < right.waste;
      });
      for (std::size_t i = 0; i < drafts.size() && i < kMostRows; ++i) {
        if (least_waste <= std::max(kLittle, drafts[i].waste)) break;
        Row row = shared(std::move(drafts[i]), least_waste);
        const double waste = wasted(row);
        if (waste >= least_waste) continue;
        best = std::move(row);
        least_waste = waste;
      }
    }
    for (const Cell& cell : best) {
      for (std::size_t i = 0; i < cell.places.size(); ++i) {
        if (cell.owners[i] != kLeft) filling_.take(cell.places[i]);
      }
    }
    return best;
  }

  double wasted(const Row& row) const {
    double longest_s = 0;
    double work_s = 0;
    for (const Cell& cell : row) {
      longest_s = std::max(longest_s, cell.seconds);
      work_s += cell.dense_s;
    }
    return work_s > 0 ? 1 - work_s / (static_cast<double>(size_) * longest_s) : 1;
  }

  // The cells as ranks run them, or nothing where more than `most` would be wasted; what finds no room stays for later rows.
  Row shared(Draft draft, double most) {
    double longest_s = 0;
    Row row;
    for (OpenCell& open : draft.cells) {
      Cell cell;
      cell.first = first_ + static_cast<int32_t>(open.first);
      cell.num_ranks = open.num_ranks;
      cell.places = std::move(open.places);
      if (!std::is_sorted(cell.places.begin(), cell.places.end())) {
        std::sort(cell.places.begin(), cell.places.end());
      }
      sharing_.share(cell, std::max(longest_s, draft.longest_s));
      longest_s = std::max(longest_s, cell.seconds);
      if (1 - draft.work_s / (static_cast<double>(size_) * longest_s) > most) return {};
      row.push_back(std::move(cell));
    }
    return row;
  }

  int32_t first_;
  int64_t size_;
  Filling filling_;
  Sharing sharing_;
};

}  // namespace

std::vector<Row> deal_rows(const Problem& dense, const Items& items, int32_t first, int64_t size) {
  return Dealer(dense, items, first, size).run();
}

}  // namespace hdp
