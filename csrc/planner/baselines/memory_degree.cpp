#include "planner/baselines/memory_degree.hpp"

#include <algorithm>
#include <cmath>

#include "planner/base/cost_model.hpp"
#include "planner/base/memory.hpp"
#include "planner/base/slices.hpp"

namespace hdp {

MemoryDegree memory_degree(const Problem& problem, int64_t length, double share_s) {
  const int64_t degree = least_degree(problem, length);
  const double ratio = offload_ratio(problem, length, degree).value();
  if (ratio == 0) return {degree, 0};
  int64_t without = least_degree(length, problem.tokens_per_rank, problem.slice_multiple);
  if (without == 0) without = problem.num_ranks;  // it needs offload on any number
  const int64_t last = std::min(without, problem.num_ranks);
  const double parts = std::ceil(compute_s(problem.cost, length) / share_s);
  // the negated form sends the NaN of a cost model without times to the least degree
  if (!(parts > static_cast<double>(degree))) return {degree, ratio};
  auto wanted = static_cast<int64_t>(std::min(parts, static_cast<double>(last)));
  for (; wanted <= last; ++wanted) {
    if (const auto found = offload_ratio(problem, length, wanted)) return {wanted, *found};
  }
  return {degree, ratio};
}

}  // namespace hdp
