#include "planner/pp_balance/pp_balance.hpp"

#include <algorithm>
#include <future>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "planner/base/memory.hpp"
#include "planner/base/side_by_side.hpp"
#include "planner/baselines/baselines.hpp"
#include "planner/dp_balance/decide.hpp"
#include "planner/dp_balance/shorts.hpp"
#include "planner/pp_balance/choices.hpp"
#include "planner/pp_balance/draft.hpp"
#include "planner/pp_balance/parted.hpp"
#include "planner/rings/batch.hpp"
#include "planner/rings/rings.hpp"
#include "planner/schedule/schedule.hpp"

namespace hdp {
namespace {

// If the best sketch is so much slower than plans already made, the search ends.
constexpr double kHopeless = 1.12;

// The most leaders that become plans; of small problems more sketches do, as many as place so many
// sequences and ranks together, for each unit of effort, but not more than kMostDrafts.
constexpr std::size_t kDrafts = 4;
constexpr std::size_t kDraftWork = 20000;
constexpr std::size_t kMostDrafts = 64;

// Units and kinds of rounds of which the other decisions are improved.
constexpr std::size_t kFamilies = 4;

// Of the search over each decision in turn.
constexpr int kRounds = 2;

// Operations that all sketches may run, for each unit of effort, and what a seat in a round counts.
constexpr int64_t kWork = 30'000'000;
constexpr int64_t kSeatWork = 250;

// A sketch that is so far above what no plan can beat is worth all of that; one that is nearer a
// share of it; one as near as kCloseEnough nothing.
constexpr double kWorthAll = 0.04;
constexpr double kCloseEnough = 0.01;

// Sketches that are worked out at the same time, if work is left for so many, and plans.
constexpr int64_t kAtOnce = 4;
constexpr std::size_t kDraftsAtOnce = 2;

// What a sketch leaves out makes its plan slower: one that is not faster than a plan already made
// by this factor is not worth another plan.
constexpr double kPromising = 1.003;

// A sketch of fewer chunks than its plan has takes up to so much longer.
constexpr double kOfFewChunks = 1.12;

// The schedule with at most two chunks a stage, neighbours together: in a sketch more of them cost
// time and change little.
Problem with_few_chunks(const Problem& problem) {
  constexpr int64_t kFew = 2;
  Problem result = problem;
  if (problem.model_chunks <= kFew) return result;
  result.model_chunks = kFew;
  if (problem.row_weights.empty()) return result;
  result.row_weights.assign(index(kFew * problem.pipeline_stages), 0.0);
  for (int64_t chunk = 0; chunk < problem.model_chunks; ++chunk) {
    for (int64_t stage = 0; stage < problem.pipeline_stages; ++stage) {
      const int64_t row = chunk * kFew / problem.model_chunks * problem.pipeline_stages + stage;
      result.row_weights[index(row)] +=
          problem.row_weights[index(chunk * problem.pipeline_stages + stage)];
    }
  }
  return result;
}

// Improves one decision after the other on sketches, then works out the best ones.
class Search {
 public:
  // Plans that take to_beat_s are known.
  explicit Search(const Batch& batch, double to_beat_s = kInfinity)
      : problem_(batch.problem),
        sketched_(with_few_chunks(problem_)),
        order_(batch.order),
        all_(whole_sequences(problem_, order_)),
        group_(group_size(problem_)),
        unit_s_(batch.full_s),
        mean_s_(batch.share_s),
        bound_s_(batch.bound_s / static_cast<double>(problem_.pipeline_stages)),
        to_beat_s_(to_beat_s) {}

  // No plan where none is as fast as those that are known.
  PipelineDraft run() {
    const int64_t work = kWork * problem_.effort;
    try_choices(first_choices(group_), work / 4);
    for (int round = 0; round < kRounds; ++round) {
      if (is_hopeless()) return {};
      try_around([&](const Choice& from) { return other_deals(from); });
      try_around([&](const Choice& from) { return other_orders(from, group_); });
    }
    PipelineDraft best = best_draft();
    const bool is_beaten = to_beat_s_ < kInfinity;
    if (best.plan.num_micro_batches() > 0 || is_beaten) return best;
    // too few short sequences to stand between rings
    sketch_all({{0, kOnAll, Profile::kRising, 0, false}});
    return best_draft();
  }

 private:
  struct Split {
    Split(const Problem& problem, const std::vector<SequenceId>& order,
          const std::vector<Whole>& all, double most_s)
        : longs(long_sequences(problem, order, most_s)), shorts(problem, all, longs.size()) {}

    std::vector<LongSequence> longs;
    Shorts shorts;
  };

  struct Seats {
    std::once_flag once;
    Seating seating;
    Outline outline;
  };

  struct Sketched {
    Choice choice;
    const Split* split = nullptr;
    Seats* seats = nullptr;
    Arrangement arrangement;
    Sketch sketch;
  };

  // The best of each family, so many of these.
  std::vector<const Sketched*> leaders(std::size_t num) const {
    std::vector<const Sketched*> result;
    for (const Sketched& one : ranked_) {
      const bool is_known = std::any_of(result.begin(), result.end(), [&](const Sketched* other) {
        return other->choice.unit == one.choice.unit && other->choice.groups == one.choice.groups;
      });
      if (!is_known && result.size() < num) result.push_back(&one);
    }
    return result;
  }

  template <typename Neighbours>
  void try_around(const Neighbours& neighbours) {
    std::vector<Choice> choices;
    for (const Sketched* one : leaders(kFamilies)) {
      const std::vector<Choice> around = neighbours(one->choice);
      choices.insert(choices.end(), around.begin(), around.end());
    }
    try_choices(choices, work_ + std::max<int64_t>(0, kWork * problem_.effort - work_) / 3);
  }

  // Until so much work is done, or as much as what may be gained is worth.
  void try_choices(const std::vector<Choice>& choices, int64_t most_work) {
    for (auto next = choices.begin(); next != choices.end();) {
      if (!ranked_.empty() && work_ > std::min(most_work, worth())) return;
      const int64_t affordable =
          ranked_.empty() ? 1 : (most_work - work_) * static_cast<int64_t>(ranked_.size()) / work_;
      const auto num = std::min<std::ptrdiff_t>(std::clamp<int64_t>(affordable, 1, kAtOnce),
                                                choices.end() - next);
      sketch_all({next, next + num});
      next += num;
    }
  }

  bool is_hopeless() const {
    const double few = sketched_.model_chunks < problem_.model_chunks ? kOfFewChunks : 1;
    return ranked_[0].sketch.makespan_s > kHopeless * few * to_beat_s_;
  }

  // Operations that may be spent on a plan faster than the best sketch.
  int64_t worth() const {
    const double gap = ranked_[0].sketch.makespan_s / bound_s_ - 1;
    if (!(gap > kCloseEnough)) return 0;  // nor for the NaN of a cost model without times
    return static_cast<int64_t>(std::min(1.0, gap / kWorthAll) *
                                static_cast<double>(kWork * problem_.effort));
  }

  // The ones that are new, at the same time: each by itself, whatever threads there are.
  void sketch_all(const std::vector<Choice>& choices) {
    const double least_s = ranked_.empty() ? kInfinity : ranked_[0].sketch.makespan_s;
    std::vector<Sketched> all;
    for (const Choice& choice : choices) {
      const bool is_known = std::any_of(ranked_.begin(), ranked_.end(), [&](const Sketched& known) {
        return known.choice == choice;
      });
      if (is_known) continue;
      Seats& seats = seats_[{choice.unit, choice.deal, choice.groups}];
      if (seats.seating.speed.empty()) work_ += kSeatWork * problem_.num_ranks;
      all.push_back({choice, &split(choice), &seats, {}, {}});
    }
    side_by_side(all.size(), [&](std::size_t i) { work_out(all[i], least_s); });
    for (Sketched& one : all) rank(std::move(one));
  }

  void work_out(Sketched& one, double least_s) const {
    const double unit_s = unit_of(one.choice).size * unit_s_;
    Seats& seats = *one.seats;
    std::call_once(seats.once, [&] {
      seats.seating = seating(one.choice, one.split->longs, unit_s);
      seats.outline = outline(seats.seating);
    });
    one.arrangement = {rows_of(one.choice, seats.seating.rounds.size(), group_), unit_s};
    one.sketch =
        sketch(sketched_, seats.outline.seating, one.split->shorts, one.arrangement, least_s);
  }

  Seating seating(const Choice& choice, const std::vector<LongSequence>& longs,
                  double unit_s) const {
    if (choice.deal == kOnAll) return seat_on_all(problem_, longs);
    const Deal& deal = deal_of(choice);
    return seat(problem_, longs,
                {deal.level * unit_s, deal.grade, deal.most * mean_s_, choice.groups ? group_ : 1});
  }

  void rank(Sketched&& sketched) {
    work_ += sketched.sketch.work;
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

  const Split& split(const Choice& choice) {
    const double most_s = unit_of(choice).most * unit_s_;
    const auto found = splits_.find(most_s);
    if (found != splits_.end()) return found->second;
    return splits_.try_emplace(most_s, problem_, order_, all_, most_s).first->second;
  }

  // Empty if short sequences are too few.
  PipelineDraft draft(const Sketched& sketched) const {
    if (sketched.sketch.shares.empty()) return {};
    const Seats& seats = *sketched.seats;
    std::vector<double> shares;
    for (const std::size_t lane : seats.outline.lane_of_rank) {
      shares.push_back(sketched.sketch.shares[lane]);
    }
    return pipeline_draft(problem_, seats.seating, sketched.split->shorts, sketched.arrangement,
                          std::move(shares));
  }

  // The leaders first, then the fastest of all.
  std::vector<const Sketched*> to_draft() const {
    std::vector<const Sketched*> result = leaders(kDrafts);
    const std::size_t size = order_.size() + index(problem_.num_ranks);
    const std::size_t most = index(problem_.effort) * kDraftWork / size;
    for (const Sketched& one : ranked_) {
      if (result.size() >= std::min(most, kMostDrafts)) break;
      if (std::find(result.begin(), result.end(), &one) == result.end()) result.push_back(&one);
    }
    return result;
  }

  // Of the most promising plans; if short sequences are too few for all of these, the first that
  // can be.
  PipelineDraft best_draft() const {
    const std::vector<const Sketched*> chosen = to_draft();
    PipelineDraft best{{}, to_beat_s_};
    for (std::size_t i = 0; i < chosen.size(); i += kDraftsAtOnce) {
      double limit_s = best.makespan_s;
      const bool is_first = best.plan.num_micro_batches() == 0;
      if (is_first && sketched_.model_chunks < problem_.model_chunks) limit_s *= kOfFewChunks;
      if (kPromising * chosen[i]->sketch.makespan_s >= limit_s) continue;
      std::vector<PipelineDraft> drafts(std::min(kDraftsAtOnce, chosen.size() - i));
      side_by_side(drafts.size(), [&](std::size_t k) { drafts[k] = draft(*chosen[i + k]); });
      for (PipelineDraft& one : drafts) {
        if (one.makespan_s < best.makespan_s) best = std::move(one);
      }
    }
    const bool must = to_beat_s_ == kInfinity;
    for (std::size_t i = 0; must && i < ranked_.size() && best.plan.num_micro_batches() == 0; ++i) {
      best = draft(ranked_[i]);
    }
    return best;
  }

  const Problem& problem_;
  Problem sketched_;  // what sketches run
  const std::vector<SequenceId>& order_;
  std::vector<Whole> all_;  // in that order
  int64_t group_;
  double unit_s_;
  double mean_s_;  // of a rank, if all had the same
  double bound_s_;  // of the makespan
  double to_beat_s_;
  std::map<double, Split> splits_;                                     // by the longest left whole
  std::map<std::tuple<std::size_t, std::size_t, bool>, Seats> seats_;  // by unit, deal, groups
  std::vector<Sketched> ranked_;                                       // the fastest first
  int64_t work_ = 0;
};

// Another way: rings of nested degrees. Every member of such a ring has had the same rings before,
// so that it stands at one position in all of their lists.

// Corrections of the clocks by the simulated ends, and the part of an end that each corrects.
constexpr int kCorrections = 2;
constexpr double kDamping = 0.7;

// Sequences that all attempts at a style may place together, for effort 1.
constexpr int64_t kNestedWork = 10000;

// The first attempt, if it is so much slower than another plan, is the last one.
constexpr double kHopelessNested = 1.1;

class Nested {
 public:
  explicit Nested(const Batch& batch)
      : batch_(batch),
        problem_(batch.problem),
        decisions_(best_decisions(batch)),
        rings_(place_rings(batch, decisions_)),
        shorts_(places_of_shorts(batch, decisions_.degrees)) {}

  // The first plan; none if there is none that pipelines can run.
  void begin() { attempt({}, 1); }

  // The fastest of a few, if the first one is not far slower than a known plan.
  Plan finish(double known_s = kInfinity) {
    const bool is_hopeless = best_.makespan_s > kHopelessNested * known_s;
    if (best_.plan.num_micro_batches() == 0 || is_hopeless) return {};
    const int64_t warm_up = problem_.pipeline_stages - 1;
    int64_t left = kNestedWork * problem_.effort / static_cast<int64_t>(batch_.order.size());
    for (const ShortsStyle& style :
         {ShortsStyle{warm_up, 1}, {1, 1}, {0, 0.5}, {1, 0.5}, {warm_up, 0.5}}) {
      if (left-- > 0) attempt(style, 1);
    }
    attempt(style_, kCorrections);
    return std::move(best_.plan);
  }

 private:
  // Keeps the plan if it is the fastest so far.
  void attempt(const ShortsStyle& style, int corrections) {
    RingSchedule rings = rings_;
    for (int i = 0; i <= corrections; ++i) {
      Plan plan = place_shorts(batch_, rings, shorts_, style);
      if (plan.num_micro_batches() == 0 || first_misplaced(problem_, plan) >= 0) return;
      const auto [schedule, ends] = run_pipeline(problem_, plan);
      if (schedule.makespan_s < best_.makespan_s) {
        best_ = {std::move(plan), schedule.makespan_s};
        style_ = style;
      }
      correct(ends, rings.clocks);
    }
  }

  // Makes ranks that end late look busier.
  void correct(const std::vector<double>& ends, std::vector<double>& clocks) const {
    const double mean_s =
        std::accumulate(ends.begin(), ends.end(), 0.0) / static_cast<double>(ends.size());
    const auto stages = static_cast<double>(problem_.pipeline_stages);
    for (std::size_t rank = 0; rank < clocks.size(); ++rank) {
      clocks[rank] += kDamping * stages * (ends[rank] - mean_s);
    }
  }

  const Batch& batch_;
  const Problem& problem_;
  Decisions decisions_;
  RingSchedule rings_;
  PlaceSet shorts_;
  PipelineDraft best_;
  ShortsStyle style_;
};

}  // namespace

namespace {

// Adds a plan in parts; returns its makespan, infinite if there is none.
double add_in_parts(const Batch& batch, std::vector<Plan>& plans) {
  const Problem& problem = batch.problem;
  if (!may_run_in_parts(problem) && !problem.streams) return kInfinity;
  PipelineDraft draft = in_parts(batch);
  plans.push_back(std::move(draft.plan));
  return draft.makespan_s;
}

// Plans of rings that hold all sequences as they are, or by offload.
void add_of_rings(const Problem& problem, std::vector<Plan>& plans) {
  const Batch batch(problem);
  const double in_parts_s = add_in_parts(batch, plans);
  const auto stages = static_cast<double>(problem.pipeline_stages);
  if (stages * in_parts_s <= batch.bound_s) return;  // no plan of whole micro-batches is faster
  std::optional<Nested> nested;
  std::future<void> begun = std::async([&] { nested.emplace(batch).begin(); });
  PipelineDraft found = Search(batch, in_parts_s).run();
  plans.push_back(std::move(found.plan));
  begun.get();
  plans.push_back(nested->finish(std::min(found.makespan_s, in_parts_s)));
  plans.push_back(naive(problem));
  if (static_degree(problem) > 0) plans.push_back(static_mesh(problem));
}

// Plans that begin with sequences on few ranks, recomputed or as streams.
void add_computed_twice(const Problem& problem, bool must, std::vector<Plan>& plans) {
  const Batch batch(problem, true);
  add_in_parts(batch, plans);
  Nested nested(batch);
  nested.begin();
  plans.push_back(nested.finish());
  if (must) plans.push_back(Search(batch).run().plan);  // it computes twice only what no ring holds
}

}  // namespace

Plan pp_balance(const Problem& problem) {
  std::vector<Plan> plans;
  const bool must = may_compute_twice(problem) && !rings_hold_all(problem);
  Problem of_rings = problem;
  of_rings.recompute = of_rings.streams = false;
  if (!must) add_of_rings(of_rings, plans);
  if (may_compute_twice(problem)) add_computed_twice(problem, must, plans);
  Plan* best = nullptr;
  double least_s = kInfinity;
  for (Plan& plan : plans) {
    if (plan.num_micro_batches() == 0 || first_misplaced(problem, plan) >= 0) continue;
    const double makespan_s = plans.size() > 1 ? simulate(problem, plan).makespan_s : 0;
    if (makespan_s >= least_s) continue;
    least_s = makespan_s;
    best = &plan;
  }
  if (best == nullptr) {
    throw std::invalid_argument(
        "pp-balance: recomputed sequences, or streams, leave no plan that pipelines can run: raise "
        "tokens_per_rank");
  }
  return std::move(*best);
}

}  // namespace hdp
