#include "planner/degree_search.hpp"

#include <utility>

#include "planner/slices.hpp"

namespace hdp {
namespace {

// Sequences and ranks that all drafts of a search may have together: about a millisecond.
constexpr int64_t kSpeedUpWork = 2000;
constexpr int64_t kSaveTrafficWork = 1000;

// A change that gains less than this share of the makespan is not worth a wider ring.
constexpr double kLeastGain = 1e-4;

class Search {
 public:
  Search(const Problem& problem, const std::vector<int64_t>& order, Draft& draft, int64_t work)
      : problem_(problem),
        order_(order),
        draft_(draft),
        drafts_left_(work / (static_cast<int64_t>(order.size()) + problem.num_ranks)) {}

  bool ended() const { return drafts_left_ == 0; }

  int64_t degree(int64_t id) const {
    return draft_.decisions.degrees[static_cast<std::size_t>(id)];
  }

  // Drafts with another degree of one sequence and keeps that draft if it takes at most `limit_s`.
  bool try_degree(int64_t id, int64_t degree, double limit_s) {
    const auto at = static_cast<std::size_t>(id);
    if (ended() || degree == draft_.decisions.degrees[at] ||
        !may_share(problem_, problem_.lengths[at], degree)) {
      return false;
    }
    --drafts_left_;
    Decisions decisions = draft_.decisions;
    decisions.degrees[at] = degree;
    Draft changed = draft(problem_, order_, std::move(decisions));
    if (changed.schedule.makespan_s > limit_s) return false;
    draft_ = std::move(changed);
    return true;
  }

 private:
  const Problem& problem_;
  const std::vector<int64_t>& order_;
  Draft& draft_;
  int64_t drafts_left_;
};

}  // namespace

void speed_up(const Problem& problem, const std::vector<int64_t>& order, double enough_s,
              Draft& draft) {
  Search search(problem, order, draft, kSpeedUpWork);
  for (bool improved = true; improved;) {
    improved = false;
    for (const int64_t id : order) {
      if (search.ended() || draft.schedule.makespan_s <= enough_s) return;
      const double limit_s = draft.schedule.makespan_s * (1 - kLeastGain);
      const int64_t degree = search.degree(id);
      improved |= search.try_degree(id, degree + 1, limit_s) ||
                  search.try_degree(id, problem.num_ranks, limit_s) ||
                  search.try_degree(id, degree - 1, limit_s);
    }
  }
}

void save_traffic(const Problem& problem, const std::vector<int64_t>& order, double limit_s,
                  Draft& draft) {
  Search search(problem, order, draft, kSaveTrafficWork);
  for (const int64_t id : order) {
    const int64_t least = least_degree(problem.lengths[static_cast<std::size_t>(id)],
                                       problem.tokens_per_rank, problem.slice_multiple);
    if (search.degree(id) == least || search.try_degree(id, least, limit_s)) continue;
    while (search.degree(id) > least + 1 &&
           search.try_degree(id, search.degree(id) - 1, limit_s)) {
    }
  }
}

}  // namespace hdp
