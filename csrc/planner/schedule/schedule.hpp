// The time a plan takes: what the strategies compare their candidates by.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "planner/base/parts.hpp"
#include "planner/base/types.hpp"

namespace hdp {

struct Schedule {
  double makespan_s = 0;
  double ring_tokens = 0;  // tokens that cross from one rank to the next, forward
  int64_t max_tokens_on_a_rank = 0;
  // In lockstep:
  int64_t num_positions = 0;  // of the longest list
  double padding_share = 0;   // of the places in all lists
};

// One micro-batch by itself.
struct MicroBatchLoad {
  double seconds = 0;            // of its slowest member
  double ring_tokens = 0;        // as in Schedule
  int64_t tokens_on_a_rank = 0;  // padded, of its fullest member
};

MicroBatchLoad micro_batch_load(const Problem& problem, const Plan& plan, int64_t micro_batch);

// Calls visit(m, seconds) for each micro-batch; what they add up to, times left out.
template <typename Visit>
Schedule sum_of_loads(const Problem& problem, const Plan& plan, const Visit& visit) {
  Schedule schedule;
  for (int64_t m = 0; m < plan.num_micro_batches(); ++m) {
    const MicroBatchLoad load = micro_batch_load(problem, plan, m);
    visit(m, load.seconds);
    schedule.ring_tokens += load.ring_tokens;
    schedule.max_tokens_on_a_rank = std::max(schedule.max_tokens_on_a_rank, load.tokens_on_a_rank);
  }
  return schedule;
}

// Runs the micro-batches in launch order: the members of a ring wait for each other at the start,
// and all of them take the time of the slowest. With pipeline stages, the exact 1F1B schedule.
Schedule simulate(const Problem& problem, const Plan& plan);

// When each rank is free then, without pipeline stages.
std::vector<double> rank_ends(const Problem& problem, const Plan& plan);

// As simulate(), for problem.pipeline_stages > 1; in lockstep where ranks share experts. Throws
// std::invalid_argument for a plan with a misplaced micro-batch, which may run into a deadlock.
Schedule simulate_pipeline(const Problem& problem, const Plan& plan);

// The same of a plan without one, and when each rank ends; experts are not shared.
struct PipelineRun {
  Schedule schedule;
  std::vector<double> ends;
};

PipelineRun run_pipeline(const Problem& problem, const Plan& plan);

struct Scheduled {
  Plan plan;
  Schedule schedule;
};

Scheduled scheduled(const Problem& problem, Plan plan);

// Of ranks that are pipelines of several stages, plain or interleaved, exactly:

// The first micro-batch that does not stand at the same position in the lists of all its ranks;
// -1 if there is none.
int64_t first_misplaced(const Problem& problem, const Plan& plan);

// Micro-batches that a stage runs through one model chunk before the next; a rank's count is padded
// to a multiple of it.
int64_t group_size(const Problem& problem);

// How micro-batches pass through stages, beside their times.
struct Passing {
  std::vector<int32_t> num_parts;  // empty: all run whole
  std::vector<bool> twice;         // computed again in backward; up to the last one that is
  std::vector<double> growth;      // of the times of its parts; up to the last stream

  bool is_twice(std::size_t m) const { return m < twice.size() && twice[m]; }
  bool streams(std::size_t m) const { return growth_of(m) > 0; }
  double growth_of(std::size_t m) const { return m < growth.size() ? growth[m] : 0; }
};

Passing passing_of(const Problem& problem, const Plan& plan);

// When each rank ends, if micro-batch m, on ranks [offsets[m], offsets[m + 1]), takes seconds[m]
// over all stages, a third of it forward, or a quarter if it is computed twice. Every micro-batch
// must stand at one position. The ranks may be fewer or others than the problem's, of which only
// stages, chunks and weights count.
std::vector<double> pipeline_ends(const Problem& problem, const std::vector<int32_t>& rank_offsets,
                                  const std::vector<int32_t>& ranks,
                                  const std::vector<double>& seconds, int64_t num_ranks,
                                  const Passing& passing = {});

// That of parts: they pass from stage to stage, forward in order, backward in reverse.
std::vector<double> streamed_ends(const Problem& problem, const std::vector<int32_t>& rank_offsets,
                                  const std::vector<int32_t>& ranks,
                                  const std::vector<double>& seconds, int64_t num_ranks,
                                  const Passing& passing);

// The two passes of a micro-batch that takes so long.
struct PassTimes {
  PassTimes(double seconds, bool twice)
      : forward_s(seconds / (twice ? 4 : 3)), backward_s((twice ? 3 : 2) * forward_s) {}

  double forward_s;
  double backward_s;
};

// The problem's row_weights, equal ones if it has none.
std::vector<double> weights_of_rows(const Problem& problem);

// Micro-batches that run together: a single one; where ranks share experts those of a position of
// their domain, and of the domains that rings tie to it. Domains stand in the place of ranks then.
struct Together {
  int64_t num_ranks = 0;
  std::vector<int32_t> offsets{0};
  std::vector<int32_t> ranks;
  std::vector<double> seconds;              // of the slowest
  Passing passing;                          // in the most parts of any
  std::vector<std::size_t> of_micro_batch;  // index into these, of each of the plan's

  double makespan_s(const Problem& problem) const;  // of pipelines
};

Together run_together(const Problem& problem, const Plan& plan);

// Whether micro-batches may run in parts.
bool may_run_in_parts(const Problem& problem);

// Has the micro-batches of a plan run in as many parts, powers of two, as make the step shortest,
// those that run together in equally many. Others than of plans whose micro-batches stand at one
// position stay whole.
void choose_parts(const Problem& problem, Plan& plan);

// Has those that run together run in as many parts as the one of them that has most.
void equalize_parts(const Problem& problem, Plan& plan);

// Of neighbouring ranks that share experts and wait for each other at every position:

// The position of each micro-batch in the lists of all its ranks: what the plan says, or the first
// one that is free on all of them and behind what they run before.
std::vector<int32_t> aligned_positions(const Problem& problem, const Plan& plan);

// As simulate(), for problem.expert_ranks > 1. At a position a domain takes the time of its slowest
// rank without experts, and on top 1/E of its tokens' time in experts, on its slowest rank. A ring
// over several domains ties their positions: they start together and take the time of the slowest.
// With pipeline stages domains are the pipelines, and each stage takes its part of a position.
Schedule simulate_lockstep(const Problem& problem, const Plan& plan);

// The problem without the time that experts take.
Problem without_experts(const Problem& problem);

}  // namespace hdp
