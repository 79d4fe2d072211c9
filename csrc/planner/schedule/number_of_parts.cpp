// In how many parts the micro-batches of a finished plan run.
#include <algorithm>
#include <vector>

#include "planner/schedule/schedule.hpp"

namespace hdp {
namespace {

// By what share of its time a micro-batch may become longer; each is tried.
constexpr double kLonger[] = {1.0 / 64, 1.0 / 16, 1.0 / 4, 1.0 / 2};

// Seconds of every micro-batch, all in so many parts.
std::vector<double> seconds_in(const Problem& problem, Plan& plan, int32_t number) {
  plan.num_parts.assign(index(plan.num_micro_batches()), number);
  std::vector<double> seconds;
  sum_of_loads(problem, plan, [&](int64_t, double s) { seconds.push_back(s); });
  return seconds;
}

}  // namespace

bool may_run_in_parts(const Problem& problem) {
  return problem.sequence_parts > 1 && problem.pipeline_stages > 1 && problem.model_chunks == 1;
}

void choose_parts(const Problem& problem, Plan& plan) {
  if (!may_run_in_parts(problem) || first_misplaced(problem, plan) >= 0) return;
  std::vector<int32_t> numbers;
  for (int64_t number = 1; number <= problem.sequence_parts; number *= 2) {
    numbers.push_back(static_cast<int32_t>(number));
  }
  std::vector<std::vector<double>> seconds;
  for (const int32_t number : numbers) seconds.push_back(seconds_in(problem, plan, number));
  const std::size_t size = seconds.front().size();
  std::vector<int32_t> best(size, 1);
  const auto makespan_s = [&](const std::vector<double>& taken, const std::vector<int32_t>& parts) {
    const std::vector<double> ends = pipeline_ends_in_parts(
        problem, plan.rank_offsets, plan.ranks, taken, parts, problem.num_ranks);
    return *std::max_element(ends.begin(), ends.end());
  };
  double least_s = makespan_s(seconds.front(), best);
  for (const double longer : kLonger) {
    std::vector<int32_t> parts(size, 1);
    std::vector<double> taken = seconds.front();
    for (std::size_t m = 0; m < size; ++m) {
      for (std::size_t k = 1; k < numbers.size(); ++k) {
        if (seconds[k][m] > (1 + longer) * seconds[0][m]) continue;
        parts[m] = numbers[k];
        taken[m] = seconds[k][m];
      }
    }
    const double found_s = makespan_s(taken, parts);
    if (found_s >= least_s) continue;
    least_s = found_s;
    best = std::move(parts);
  }
  plan.num_parts.clear();
  if (*std::max_element(best.begin(), best.end()) > 1) plan.num_parts = std::move(best);
}

}  // namespace hdp
