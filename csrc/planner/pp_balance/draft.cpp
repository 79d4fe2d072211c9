#include "planner/pp_balance/draft.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "planner/base/cost_model.hpp"
#include "planner/base/parts.hpp"
#include "planner/schedule/ways.hpp"
#include "planner/pp_balance/menu.hpp"
#include "planner/schedule/schedule.hpp"

namespace hdp {
namespace {

// Corrections of the shares; more gain little.
constexpr int kSketchIterations = 3;
constexpr int kDraftIterations = 2;

// A sketch so much slower than the best one is not corrected, once and twice.
constexpr double kWorthCorrecting[kSketchIterations - 1] = {1.15, 1.03};

// What a slot costs besides, in operations.
constexpr int64_t kSlotWork = 8;

// The outline of a plan's micro-batches while it is a sketch.
struct SketchedOrder {
  std::vector<int32_t> offsets{0};
  std::vector<int32_t> lanes;
  std::vector<double> seconds;
  std::vector<int32_t> num_parts;

  void add(const SeatedRing& ring) {
    lanes.insert(lanes.end(), ring.lanes.begin(), ring.lanes.end());
    close(ring.seconds, ring.num_parts);
  }

  void add(std::size_t lane, double time_s, int64_t parts) {
    lanes.push_back(static_cast<int32_t>(lane));
    close(time_s, static_cast<int32_t>(parts));
  }

 private:
  void close(double time_s, int32_t parts) {
    offsets.push_back(static_cast<int32_t>(lanes.size()));
    seconds.push_back(time_s);
    num_parts.push_back(parts);
  }
};

int64_t parts_of_own(const Problem& problem, const Arrangement& arrangement, double seconds) {
  return arrangement.part_s > 0 ? parts_of_pack(problem, seconds, arrangement.part_s) : 1;
}

Plan plan_of(const Problem& problem, const Seating& seating, const Arrangement& arrangement,
             const Filling& filling) {
  const double part_s = arrangement.part_s;
  std::vector<int64_t> num_own;
  for (const auto& bins : filling.bins) num_own.push_back(static_cast<int64_t>(bins.size()));
  Plan plan;
  in_launch_order(
      seating, arrangement.rows, num_own,
      [&](std::size_t ring) {
        const SeatedRing& seated = seating.rings[ring];
        add_sequence(problem, seated.lanes, seated.sequence, plan);
        if (part_s > 0) plan.num_parts.push_back(seated.num_parts);
      },
      [&](std::size_t rank, int64_t i) {
        const Bin& bin = filling.bins[rank][index(i)];
        plan.add({static_cast<int32_t>(rank)}, bin);
        if (part_s == 0) return;
        double seconds = 0;
        for (const SequenceId id : bin) seconds += compute_s(problem.cost, problem.lengths[index(id)]);
        plan.num_parts.push_back(
            static_cast<int32_t>(parts_of_own(problem, arrangement, seconds)));
      });
  return plan;
}

}  // namespace

Sketch sketch(const Problem& problem, const Seating& seating, const Shorts& shorts,
              const Arrangement& arrangement, double least_s) {
  Sketch best;
  const OwnSlots own(problem, seating, shorts, arrangement.rows, arrangement.own_s);
  const std::size_t num_lanes = seating.speed.size();
  if (own.num_needed() > static_cast<double>(shorts.size())) return best;
  std::vector<double> shares = first_shares(seating, shorts.total_s());
  for (int i = 0; i < kSketchIterations; ++i) {
    std::vector<double> wanted_s;
    std::vector<std::size_t> first;  // of each lane's, in them
    std::vector<int64_t> num_own;
    for (std::size_t lane = 0; lane < num_lanes; ++lane) {
      first.push_back(wanted_s.size());
      own.add_wanted_s(lane, shares[lane], wanted_s);
      num_own.push_back(static_cast<int64_t>(wanted_s.size() - first.back()));
    }
    SketchedOrder order;
    in_launch_order(
        seating, arrangement.rows, num_own,
        [&](std::size_t ring) { order.add(seating.rings[ring]); },
        [&](std::size_t lane, int64_t own_place) {
          const double time_s = wanted_s[first[lane] + index(own_place)];
          const int64_t parts = parts_of_own(problem, arrangement, time_s);
          const double tokens = time_s * shorts.tokens_per_s();
          const double fixed = fixed_s(problem.cost, 1, tokens, parts);
          order.add(lane, (time_s + fixed) / seating.speed[lane], parts);
        });
    const std::vector<double> ends =
        pipeline_ends(problem, order.offsets, order.lanes, order.seconds,
                      static_cast<int64_t>(num_lanes), {order.num_parts, {}, {}});
    const double makespan_s = *std::max_element(ends.begin(), ends.end());
    const int64_t passes = 2 * problem.pipeline_stages * problem.model_chunks;
    best.work += (passes + kSlotWork) * static_cast<int64_t>(order.lanes.size());
    if (makespan_s < best.makespan_s) best = {shares, makespan_s, best.work};
    if (i + 1 == kSketchIterations) break;
    if (best.makespan_s > kWorthCorrecting[i] * least_s) break;
    shares = next_shares(seating, shares, ends, problem.pipeline_stages, shorts.total_s());
  }
  return best;
}

PipelineDraft pipeline_draft(const Problem& problem, const Seating& seating, const Shorts& shorts,
                             const Arrangement& arrangement, std::vector<double> shares) {
  PipelineDraft best;
  const OwnSlots own(problem, seating, shorts, arrangement.rows, arrangement.own_s);
  for (int i = 0; i < kDraftIterations; ++i) {
    Filling filling;
    std::vector<std::vector<Slot>> slots;
    for (std::size_t rank = 0; rank < shares.size(); ++rank) {
      slots.push_back(own.of(rank, shares[rank]));
    }
    if (!shorts.fill(slots, filling)) return best;
    Plan plan = plan_of(problem, seating, arrangement, filling);
    const auto [schedule, ends] = run_pipeline(problem, plan);
    const double makespan_s = schedule.makespan_s;
    if (makespan_s < best.makespan_s) best = {std::move(plan), makespan_s};
    shares = next_shares(seating, filling.seconds, ends, problem.pipeline_stages, shorts.total_s());
  }
  return best;
}

}  // namespace hdp
