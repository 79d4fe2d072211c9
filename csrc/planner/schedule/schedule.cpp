#include "planner/schedule/schedule.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "planner/base/cost_model.hpp"
#include "planner/base/parts.hpp"
#include "planner/base/slices.hpp"
#include "planner/base/stream.hpp"

namespace hdp {
namespace {

// Sequences of one member or of the whole ring.
struct Sum {
  double attention_s = 0;
  double compute_s = 0;
  double tokens = 0;
  int64_t slice_tokens = 0;

  void add(const Problem& problem, SequenceId id, int64_t degree) {
    const int64_t length = problem.lengths[index(id)];
    attention_s += hdp::attention_s(problem.cost, length);
    compute_s += hdp::compute_s(problem.cost, length);
    tokens += static_cast<double>(length);
    slice_tokens += hdp::slice_tokens(length, degree, problem.slice_multiple);
  }
};

// What the members of a ring do together.
class RingTime {
 public:
  RingTime(const Problem& problem, const Plan& plan, int64_t m)
      : problem_(problem),
        ring_(plan.ring(m)),
        num_parts_(plan.parts(m)),
        num_forwards_(plan.is_recomputed(m) ? 2 : 1) {
    for (const SequenceId id : plan.sharded(m)) sum_.add(problem, id, degree());
    if (num_parts_ > 1 && degree() > 1) {
      std::vector<double> lengths;
      for (const SequenceId id : plan.sharded(m)) {
        lengths.push_back(static_cast<double>(problem.lengths[index(id)]));
      }
      sizes_ = part_sizes(lengths, num_parts_, problem.linear_tokens);
    }
    links_ = links_of(problem.cost, ring_);
  }

  int64_t degree() const { return ring_.last - ring_.first; }
  const Sum& sum() const { return sum_; }
  int64_t num_parts() const { return num_parts_; }

  // Seconds of a member that has `local_s` of its own sequences.
  double member_s(int32_t rank, double local_s) const {
    const auto d = static_cast<double>(degree());
    const double speed = problem_.speed(rank);
    const double shared = sum_.attention_s / d;
    const double attention = shared / speed;
    const double exposed =
        sizes_.empty()
            ? exposed_s(problem_.cost, degree(), sum_.tokens, attention, links_, num_forwards_)
            : exposed_s(problem_.cost, degree(), sizes_, attention, links_, num_forwards_);
    const double overhead =
        fixed_s(problem_.cost, degree(), sum_.tokens, num_parts_) +
        merge_s(problem_.cost, degree(), sum_.tokens) +
        made_again_s(problem_.cost, degree(), sum_.tokens, sizes_, shared, links_);
    const double computed = (sum_.compute_s / d + local_s + overhead) / speed;
    return (num_forwards_ == 2 ? kComputedTwice * computed : computed) + exposed;
  }

  // Seconds of the slowest member without locals.
  double slowest_s() const {
    if (problem_.speeds.empty()) return member_s(0, 0);
    double slowest = 0;
    for (const int32_t rank : ring_) slowest = std::max(slowest, member_s(rank, 0));
    return slowest;
  }

 private:
  const Problem& problem_;
  Span ring_;
  int64_t num_parts_;
  double num_forwards_;
  Sum sum_;
  std::vector<PartSize> sizes_;  // of a ring in parts
  Links links_;
};

// Moves the ranks' clocks.
Schedule run(const Problem& problem, const Plan& plan, std::vector<double>& clocks) {
  double makespan_s = 0;
  Schedule schedule = sum_of_loads(problem, plan, [&](int64_t m, double seconds) {
    double end = 0;
    for (const int32_t rank : plan.ring(m)) end = std::max(end, clocks[index(rank)]);
    end += seconds;
    for (const int32_t rank : plan.ring(m)) clocks[index(rank)] = end;
    makespan_s = std::max(makespan_s, end);
  });
  schedule.makespan_s = makespan_s;
  return schedule;
}

// A stream, whose only sequence is shared over its ring.
MicroBatchLoad stream_load(const Problem& problem, const Plan& plan, int64_t micro_batch) {
  const Span ring = plan.ring(micro_batch);
  const auto degree = static_cast<int64_t>(ring.size());
  const int64_t length = problem.lengths[index(*plan.sharded(micro_batch).begin())];
  const Stream stream = planned_stream(problem, plan, micro_batch);
  const Links links = links_of(problem.cost, ring);
  double seconds = 0;
  for (const int32_t rank : ring) {  // a fast one hides less
    seconds =
        std::max(seconds, stream_s(problem, length, degree, stream, links, problem.speed(rank)));
    if (problem.speeds.empty()) break;
  }
  const double tokens = stream_traffic_tokens(problem.cost, length, stream);
  return {seconds, static_cast<double>(degree - 1) * tokens, stream.tokens_on_a_rank};
}

}  // namespace

MicroBatchLoad micro_batch_load(const Problem& problem, const Plan& plan, int64_t micro_batch) {
  if (plan.parts_of_stream(micro_batch) > 0) return stream_load(problem, plan, micro_batch);
  const RingTime ring(problem, plan, micro_batch);
  const auto d = static_cast<double>(ring.degree());
  MicroBatchLoad load{ring.slowest_s(), (d - 1) * ring.sum().tokens, ring.sum().slice_tokens};
  Sum member;
  const int32_t last = plan.local_offset(micro_batch + 1);
  for (int32_t i = plan.local_offset(micro_batch); i < last; ++i) {
    const int32_t rank = plan.locals.ranks[index(i)];
    member.add(problem, plan.locals.sequences[index(i)], 1);
    if (i + 1 < last && plan.locals.ranks[index(i) + 1] == rank) continue;
    const double local_s = member.compute_s + static_cast<double>(ring.num_parts()) *
                                                problem.cost.block_all_layers_s;
    load.seconds = std::max(load.seconds, ring.member_s(rank, local_s));
    load.tokens_on_a_rank =
        std::max(load.tokens_on_a_rank, ring.sum().slice_tokens + member.slice_tokens);
    member = {};
  }
  return load;
}

Schedule simulate(const Problem& problem, const Plan& plan) {
  if (problem.pipeline_stages > 1) return simulate_pipeline(problem, plan);
  std::vector<double> clocks(index(problem.num_ranks), 0.0);
  return run(problem, plan, clocks);
}

std::vector<double> rank_ends(const Problem& problem, const Plan& plan) {
  std::vector<double> clocks(index(problem.num_ranks), 0.0);
  run(problem, plan, clocks);
  return clocks;
}

Schedule simulate_pipeline(const Problem& problem, const Plan& plan) {
  const int64_t misplaced = first_misplaced(problem, plan);
  if (misplaced >= 0) {
    throw std::invalid_argument(
        "micro-batch " + std::to_string(misplaced) +
        " stands at different positions in its ranks' lists and may run into a deadlock with " +
        std::to_string(problem.pipeline_stages) + " pipeline stages: use strategy pp-balance");
  }
  if (problem.expert_ranks > 1) return simulate_lockstep(problem, plan);
  return run_pipeline(problem, plan).schedule;
}

PipelineRun run_pipeline(const Problem& problem, const Plan& plan) {
  PipelineRun run;
  std::vector<double> seconds;
  run.schedule = sum_of_loads(problem, plan, [&](int64_t, double s) { seconds.push_back(s); });
  run.ends = pipeline_ends(problem, plan.rank_offsets, plan.ranks, seconds, problem.num_ranks,
                           passing_of(problem, plan));
  run.schedule.makespan_s = *std::max_element(run.ends.begin(), run.ends.end());
  return run;
}

Scheduled scheduled(const Problem& problem, Plan plan) {
  const Schedule schedule = simulate(problem, plan);
  return {std::move(plan), schedule};
}

}  // namespace hdp
