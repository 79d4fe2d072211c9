#include "planner/degrees.hpp"

#include <algorithm>
#include <cmath>

#include "planner/cost_model.hpp"
#include "planner/slices.hpp"

namespace hdp {

bool may_share(const Problem& problem, int64_t length, int64_t degree) {
  const int64_t least = least_degree(length, problem.tokens_per_rank, problem.slice_multiple);
  if (degree <= least) return degree == least;
  return degree <= problem.num_ranks && degree <= length / (2 * problem.slice_multiple) &&
         slice_tokens(length, degree, problem.slice_multiple) <= problem.tokens_per_rank;
}

int64_t balanced_degree(const Problem& problem, int64_t length, double longest_s) {
  const int64_t least = least_degree(length, problem.tokens_per_rank, problem.slice_multiple);
  const double wanted = std::ceil(compute_s(problem.cost, length) / longest_s);
  const int64_t useful = std::min(greatest_hidden_degree(problem.cost, length, problem.num_ranks),
                                  length / (2 * problem.slice_multiple));
  // the negated form sends the NaN of a cost model without times to the memory minimum
  if (!(wanted > static_cast<double>(least)) || useful <= least) return least;
  const int64_t degree =
      wanted < static_cast<double>(useful) ? static_cast<int64_t>(wanted) : useful;
  return may_share(problem, length, degree) ? degree : least;
}

Degrees balanced_degrees(const Problem& problem, double longest_s) {
  Degrees degrees;
  degrees.reserve(problem.lengths.size());
  for (const int64_t length : problem.lengths) {
    degrees.push_back(balanced_degree(problem, length, longest_s));
  }
  return degrees;
}

Degrees widened(const Problem& problem, Degrees degrees) {
  for (std::size_t id = 0; id < degrees.size(); ++id) {
    if (degrees[id] > problem.num_ranks / 2 &&
        may_share(problem, problem.lengths[id], problem.num_ranks)) {
      degrees[id] = problem.num_ranks;
    }
  }
  return degrees;
}

}  // namespace hdp
