#include "planner/pp_balance/nested.hpp"

#include <numeric>
#include <utility>
#include <vector>

#include "planner/dp_balance/decide.hpp"
#include "planner/dp_balance/shorts.hpp"
#include "planner/rings/rings.hpp"
#include "planner/schedule/pipeline.hpp"
#include "planner/schedule/schedule.hpp"

namespace hdp {
namespace {

// Corrections of the clocks by the simulated ends, and the part of an end that each corrects.
constexpr int kCorrections = 2;
constexpr double kDamping = 0.7;

// Sequences that all attempts at a style may place together, for effort 1.
constexpr int64_t kWork = 10000;

class Nested {
 public:
  explicit Nested(const Batch& batch)
      : batch_(batch),
        problem_(batch.problem),
        decisions_(best_decisions(batch)),
        rings_(place_rings(batch, decisions_)),
        shorts_(places_of_shorts(batch, decisions_.degrees)) {}

  PipelineDraft run() {
    attempt({}, 1);
    if (best_.plan.num_micro_batches() == 0) return std::move(best_);
    const int64_t warm_up = problem_.pipeline_stages - 1;
    int64_t left = kWork * problem_.effort / static_cast<int64_t>(batch_.order.size());
    for (const ShortsStyle& style :
         {ShortsStyle{warm_up, 1}, {1, 1}, {0, 0.5}, {1, 0.5}, {warm_up, 0.5}}) {
      if (left-- > 0) attempt(style, 1);
    }
    attempt(style_, kCorrections);
    return std::move(best_);
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

PipelineDraft nested_draft(const Batch& batch) { return Nested(batch).run(); }

}  // namespace hdp
