#include "planner/pp_balance/draft.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "planner/base/cost_model.hpp"
#include "planner/base/memory.hpp"
#include "planner/pp_balance/shares.hpp"
#include "planner/schedule/pipeline.hpp"
#include "planner/schedule/schedule.hpp"

namespace hdp {
namespace {

// Corrections of the shares; more gain little.
constexpr int kSketchIterations = 3;
constexpr int kDraftIterations = 3;

// The outline of a plan's micro-batches while it is a sketch.
struct SketchedOrder {
  std::vector<int32_t> offsets{0};
  std::vector<int32_t> lanes;
  std::vector<double> seconds;

  void add(const std::vector<int32_t>& ring, double time_s) {
    lanes.insert(lanes.end(), ring.begin(), ring.end());
    close(time_s);
  }

  void add(std::size_t lane, double time_s) {
    lanes.push_back(static_cast<int32_t>(lane));
    close(time_s);
  }

 private:
  void close(double time_s) {
    offsets.push_back(static_cast<int32_t>(lanes.size()));
    seconds.push_back(time_s);
  }
};

Plan plan_of(const Problem& problem, const Seating& seating, const Rows& rows,
             const Filling& filling) {
  std::vector<int64_t> num_own;
  for (const auto& bins : filling.bins) num_own.push_back(static_cast<int64_t>(bins.size()));
  Plan plan;
  in_launch_order(
      seating, rows, num_own,
      [&](std::size_t ring) {
        const SeatedRing& seated = seating.rings[ring];
        const int64_t length = problem.lengths[static_cast<std::size_t>(seated.sequence)];
        const auto degree = static_cast<int64_t>(seated.lanes.size());
        plan.add(seated.lanes, {seated.sequence}, offload_ratio(problem, length, degree).value());
      },
      [&](std::size_t rank, int64_t i) {
        plan.add({static_cast<int32_t>(rank)}, filling.bins[rank][static_cast<std::size_t>(i)]);
      });
  return plan;
}

std::vector<double> seconds_of(const Problem& problem, const Plan& plan) {
  std::vector<double> seconds;
  for (int64_t m = 0; m < plan.num_micro_batches(); ++m) {
    seconds.push_back(micro_batch_load(problem, plan, m).seconds);
  }
  return seconds;
}

}  // namespace

Sketch sketch(const Problem& problem, const Seating& seating, const Shorts& shorts,
              const Arrangement& arrangement, double hopeless_s) {
  Sketch best;
  const std::vector<int64_t> needed = own_needed(seating, arrangement.rows);
  double all_needed = 0;
  for (std::size_t lane = 0; lane < needed.size(); ++lane) {
    all_needed += static_cast<double>(needed[lane]) * seating.weight[lane];
  }
  if (all_needed > static_cast<double>(shorts.size())) return best;
  std::vector<double> shares = first_shares(seating, shorts.total_s());
  for (int i = 0; i < kSketchIterations; ++i) {
    std::vector<int64_t> num_own;
    for (std::size_t lane = 0; lane < needed.size(); ++lane) {
      num_own.push_back(std::max(
          needed[lane], shorts.num_bins(shares[lane], arrangement.own_s * seating.speed[lane])));
    }
    SketchedOrder order;
    in_launch_order(
        seating, arrangement.rows, num_own,
        [&](std::size_t ring) {
          order.add(seating.rings[ring].lanes, seating.rings[ring].seconds);
        },
        [&](std::size_t lane, int64_t) {
          const double time_s = shares[lane] / static_cast<double>(num_own[lane]);
          order.add(lane, (time_s + fixed_s(problem.cost, 1)) / seating.speed[lane]);
        });
    const std::vector<double> ends =
        pipeline_ends(problem, order.offsets, order.lanes, order.seconds,
                      static_cast<int64_t>(needed.size()));
    const double makespan_s = *std::max_element(ends.begin(), ends.end());
    if (makespan_s < best.makespan_s) best = {shares, makespan_s};
    if (makespan_s > hopeless_s) break;
    shares = next_shares(seating, shares, ends, problem.pipeline_stages, shorts.total_s());
  }
  return best;
}

PipelineDraft pipeline_draft(const Problem& problem, const Seating& seating, const Shorts& shorts,
                             const Arrangement& arrangement, std::vector<double> shares) {
  PipelineDraft best;
  const std::vector<int64_t> needed = own_needed(seating, arrangement.rows);
  for (int i = 0; i < kDraftIterations; ++i) {
    Filling filling;
    if (!shorts.fill(needed, shares, arrangement.own_s, filling)) return best;
    Plan plan = plan_of(problem, seating, arrangement.rows, filling);
    const std::vector<double> ends =
        pipeline_ends(problem, plan.rank_offsets, plan.ranks, seconds_of(problem, plan),
                      problem.num_ranks);
    const double makespan_s = *std::max_element(ends.begin(), ends.end());
    if (makespan_s < best.makespan_s) best = {std::move(plan), makespan_s};
    shares = next_shares(seating, filling.seconds, ends, problem.pipeline_stages, shorts.total_s());
  }
  return best;
}

}  // namespace hdp
