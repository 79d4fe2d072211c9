#include "planner/pp_balance/pp_balance.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "planner/base/check.hpp"
#include "planner/baselines/baselines.hpp"
#include "planner/pp_balance/draft.hpp"
#include "planner/pp_balance/nested.hpp"
#include "planner/rings/batch.hpp"
#include "planner/schedule/pipeline.hpp"
#include "planner/schedule/schedule.hpp"

namespace hdp {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

// A sketch so much slower than the best one is not worked out.
constexpr double kHopeless = 1.3;

// The most sketches that become plans, for each unit of effort.
constexpr int64_t kDrafts = 6;

// What a sketch leaves out makes its plan slower: one that is not faster than a plan already made
// by this factor is not worth another plan.
constexpr double kPromising = 1.003;

// Of what no plan can beat: a plan this fast is not worth more sketches.
constexpr double kCloseEnough = 1.01;

// How the long sequences are dealt into rounds; times in units of a micro-batch of one sequence
// that fills a rank, except `most`: in units of a rank's mean time.
struct Deal {
  double level = 1;        // of a round, if degrees allow it
  double grade = 0;        // part of the round before that a round takes at least
  double most = kNoLimit;  // with so much to do a rank gets no more rings
};

// The most promising ones first: large problems try fewer.
constexpr std::array<Deal, 9> kDeals{{{0.5, 0.6},
                                      {0.5, 0.0},
                                      {0.5, 0.8},
                                      {2.0, 0.4},
                                      {0.5, 0.4},
                                      {1.0, 0.0},
                                      {3.0, 0.0},
                                      {0.5, 0.4, 1.5},
                                      {1.0, 0.0, 1.0}}};

std::size_t num_deals(int64_t num_ranks) {
  if (num_ranks > 4096) return 3;
  return num_ranks > 512 ? 5 : kDeals.size();
}

// In place of a deal: every sequence on all ranks.
constexpr std::size_t kOnAll = kDeals.size();

// Where the longest round stands: at the end, or in the middle with the second longest before or
// behind it.
enum class Profile { kRising, kBefore, kBehind };

struct Choice {
  std::size_t deal = 0;  // index into the deals
  Profile profile = Profile::kRising;
  int64_t own_rows = 1;  // rows without rings before the others
  double own = 1;        // greatest time of a micro-batch of short sequences, in units as above

  bool operator==(const Choice& other) const {
    return std::tie(deal, profile, own_rows, own) ==
           std::tie(other.deal, other.profile, other.own_rows, other.own);
  }
};

// Rounds come with the longest first.
Rows rows_of(const Choice& choice, std::size_t num_rounds) {
  Rows rows(static_cast<std::size_t>(choice.own_rows), kNoRound);
  Rows behind;
  for (auto round = static_cast<int64_t>(num_rounds) - 1; round >= 0; --round) {
    const bool is_odd = round % 2 == 1;
    const bool goes_behind = (choice.profile == Profile::kBefore && !is_odd && round > 0) ||
                             (choice.profile == Profile::kBehind && is_odd);
    (goes_behind ? behind : rows).push_back(round);
  }
  rows.insert(rows.end(), behind.rbegin(), behind.rend());
  return rows;
}

// Improves one decision after the other on sketches, then works out the best ones.
class Search {
 public:
  explicit Search(const Batch& batch)
      : problem_(batch.problem),
        longs_(long_sequences(problem_, batch.order)),
        shorts_(problem_, batch.order),
        unit_s_(batch.full_s),
        mean_s_(batch.share_s),
        enough_s_(kCloseEnough * batch.bound_s / static_cast<double>(problem_.pipeline_stages)) {}

  Plan run() {
    sketch_neighbours([&](const Choice& choice) { return deals(choice); });
    sketch_neighbours([&](const Choice& choice) { return arrangements(choice); });
    sketch_neighbours([&](const Choice& choice) { return deals(choice); });
    PipelineDraft best = best_draft();
    if (best.plan.num_micro_batches() > 0) return std::move(best.plan);
    // too few short sequences to stand between rings
    const Choice nothing_between{kOnAll, Profile::kRising, 0, 1};
    sketch_one(nothing_between);
    return best_draft().plan;
  }

 private:
  struct Seats {
    Seating seating;
    Outline outline;
  };

  struct Sketched {
    Choice choice;
    Sketch sketch;
  };

  std::vector<Choice> deals(const Choice& from) const {
    std::vector<Choice> result;
    const std::size_t num = num_deals(problem_.num_ranks);
    for (std::size_t deal = 0; deal < num; ++deal) {
      result.push_back({deal, from.profile, from.own_rows, from.own});
    }
    return result;
  }

  std::vector<Choice> arrangements(const Choice& from) const {
    std::vector<Choice> result;
    for (const Profile profile : {Profile::kRising, Profile::kBefore, Profile::kBehind}) {
      for (const int64_t own_rows : {0, 1, 2, 3}) {
        result.push_back({from.deal, profile, own_rows, from.own});
      }
    }
    result.push_back({from.deal, from.profile, from.own_rows, 0.5});
    return result;
  }

  // Of the best choices so far, as many as the effort.
  template <typename Neighbours>
  void sketch_neighbours(const Neighbours& neighbours) {
    std::vector<Choice> starts;
    for (std::size_t i = 0; i < ranked_.size() && i < static_cast<std::size_t>(problem_.effort);
         ++i) {
      starts.push_back(ranked_[i].choice);
    }
    if (starts.empty()) starts.emplace_back();
    for (const Choice& start : starts) {
      for (const Choice& choice : neighbours(start)) {
        if (!ranked_.empty() && ranked_[0].sketch.makespan_s <= enough_s_) return;
        sketch_one(choice);
      }
    }
  }

  void sketch_one(const Choice& choice) {
    for (const Sketched& known : ranked_) {
      if (known.choice == choice) return;
    }
    const double hopeless_s = ranked_.empty() ? kNoLimit : kHopeless * ranked_[0].sketch.makespan_s;
    Sketched sketched{choice, sketch(problem_, seats(choice).outline.seating, shorts_,
                                     arrangement(choice), hopeless_s)};
    const auto is_the_same = [&](const Sketched& known) {  // two deals may give the same rounds
      return known.sketch.makespan_s == sketched.sketch.makespan_s &&
             known.sketch.shares == sketched.sketch.shares;
    };
    if (std::any_of(ranked_.begin(), ranked_.end(), is_the_same)) return;
    const auto place = std::upper_bound(ranked_.begin(), ranked_.end(), sketched,
                                        [](const Sketched& left, const Sketched& right) {
                                          return left.sketch.makespan_s < right.sketch.makespan_s;
                                        });
    ranked_.insert(place, std::move(sketched));
  }

  const Seats& seats(const Choice& choice) {
    auto& found = seats_[choice.deal];
    if (found.seating.speed.empty()) {
      if (choice.deal == kOnAll) {
        found.seating = seat_on_all(problem_, longs_);
      } else {
        const Deal& deal = kDeals[choice.deal];
        found.seating =
            seat(problem_, longs_, {deal.level * unit_s_, deal.grade, deal.most * mean_s_});
      }
      found.outline = outline(found.seating);
    }
    return found;
  }

  Arrangement arrangement(const Choice& choice) {
    return {rows_of(choice, seats(choice).seating.rounds.size()), choice.own * unit_s_};
  }

  PipelineDraft draft(const Sketched& sketched) {
    const Seats& found = seats(sketched.choice);
    std::vector<double> shares;
    for (const std::size_t lane : found.outline.lane_of_rank) {
      shares.push_back(sketched.sketch.shares[lane]);
    }
    return pipeline_draft(problem_, found.seating, shorts_, arrangement(sketched.choice),
                          std::move(shares));
  }

  PipelineDraft best_draft() {
    PipelineDraft best;
    int64_t left = kDrafts * problem_.effort;
    for (const Sketched& sketched : ranked_) {
      if (left-- == 0 || kPromising * sketched.sketch.makespan_s >= best.makespan_s) break;
      PipelineDraft next = draft(sketched);
      if (next.makespan_s < best.makespan_s) best = std::move(next);
    }
    return best;
  }

  const Problem& problem_;
  std::vector<LongSequence> longs_;
  Shorts shorts_;
  double unit_s_;
  double mean_s_;  // of a rank, if all had the same
  double enough_s_;
  std::map<std::size_t, Seats> seats_;  // by deal
  std::vector<Sketched> ranked_;        // the fastest first
};

}  // namespace

Plan pp_balance(const Problem& problem) {
  const Batch batch(problem);
  std::vector<Plan> plans{Search(batch).run(), nested_draft(batch).plan, naive(problem)};
  if (static_degree(problem) > 0) plans.push_back(static_mesh(problem));
  Plan* best = nullptr;
  double least_s = kNoLimit;
  for (Plan& plan : plans) {
    if (plan.num_micro_batches() == 0 || first_misplaced(problem, plan) >= 0) continue;
    const double makespan_s = simulate(problem, plan).makespan_s;
    if (makespan_s >= least_s) continue;
    least_s = makespan_s;
    best = &plan;
  }
  return std::move(*best);
}

}  // namespace hdp
