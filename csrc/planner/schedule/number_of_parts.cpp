// In how many parts the micro-batches of a finished plan run.
#include <algorithm>
#include <vector>

#include "planner/schedule/schedule.hpp"

namespace hdp {
namespace {

// By what share of its time a micro-batch may become longer; each is tried.
constexpr double kLonger[] = {1.0 / 64, 1.0 / 16, 1.0 / 4, 1.0 / 2};

// Those that run together in these; beside a stream, which has its own, all are whole.
void take_parts(const Together& together, Plan& plan) {
  plan.num_parts.clear();
  for (const std::size_t i : together.of_micro_batch) {
    plan.num_parts.push_back(together.passing.streams(i) ? 1 : together.passing.num_parts[i]);
  }
  const auto is_whole = [](int32_t parts) { return parts == 1; };
  if (std::all_of(plan.num_parts.begin(), plan.num_parts.end(), is_whole)) plan.num_parts.clear();
}

}  // namespace

bool may_run_in_parts(const Problem& problem) {
  return problem.sequence_parts > 1 && problem.pipeline_stages > 1;
}

void choose_parts(const Problem& problem, Plan& plan) {
  if (!may_run_in_parts(problem) || first_misplaced(problem, plan) >= 0) return;
  std::vector<int32_t> numbers;
  for (int64_t number = 1; number <= problem.sequence_parts; number *= 2) {
    numbers.push_back(static_cast<int32_t>(number));
  }
  std::vector<Together> all;  // by number: every micro-batch in so many
  for (const int32_t number : numbers) {
    plan.num_parts.assign(index(plan.num_micro_batches()), number);
    all.push_back(run_together(problem, plan));
  }
  plan.num_parts.clear();
  Together best = all.front();
  double least_s = best.makespan_s(problem);
  for (const double longer : kLonger) {
    Together found = all.front();
    for (std::size_t i = 0; i < found.seconds.size(); ++i) {
      if (found.passing.streams(i)) continue;  // in its own parts, beside it whole
      for (const Together& other : all) {
        if (other.seconds[i] > (1 + longer) * all.front().seconds[i]) continue;
        found.seconds[i] = other.seconds[i];
        found.passing.num_parts[i] = other.passing.num_parts[i];
      }
    }
    const double found_s = found.makespan_s(problem);
    if (found_s >= least_s) continue;
    least_s = found_s;
    best = std::move(found);
  }
  take_parts(best, plan);
}

void equalize_parts(const Problem& problem, Plan& plan) {
  if (problem.expert_ranks == 1 || plan.num_parts.empty()) return;
  take_parts(run_together(problem, plan), plan);
}

}  // namespace hdp
