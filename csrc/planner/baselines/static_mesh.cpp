#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "planner/base/cost_model.hpp"
#include "planner/base/slices.hpp"
#include "planner/schedule/ways.hpp"
#include "planner/baselines/baselines.hpp"
#include "planner/baselines/packing.hpp"

namespace hdp {
namespace {

int64_t slice_of(const Problem& problem, int64_t length, int64_t degree) {
  return slice_tokens(length, degree, problem.slice_multiple);
}

// Whether a slice is no larger than the capacity; else the sequence streams, or leaves for the
// host.
bool fits(const Problem& problem, int64_t length, int64_t degree) {
  return slice_of(problem, length, degree) <= problem.tokens_per_rank;
}

Packed packed_in_order(const Problem& problem, int64_t degree) {
  Packed packed(problem.lengths.size());
  BestFit packing(problem.tokens_per_rank);
  for (const int64_t length : problem.lengths) {
    if (!fits(problem, length, degree)) continue;
    packed.add(packing.place(slice_of(problem, length, degree)));
  }
  return packed;
}

// Puts a sequence that no slice of fits on all ranks, as a micro-batch of its own.
void add_alone(const Problem& problem, SequenceId id, Plan& plan) {
  std::vector<int32_t> ring(index(problem.num_ranks));
  std::iota(ring.begin(), ring.end(), 0);
  add_sequence(problem, ring, id, plan);
}

}  // namespace

int64_t static_degree(const Problem& problem) {
  for (int64_t degree = 1; degree <= problem.num_ranks; ++degree) {
    if (problem.num_ranks % degree == 0 &&
        slice_tokens(problem.max_length, degree, problem.slice_multiple) <=
            problem.tokens_per_rank) {
      return degree;
    }
  }
  return 0;
}

Plan static_mesh(const Problem& problem) {
  int64_t degree = static_degree(problem);
  if (degree == 0 && problem.streams) degree = problem.num_ranks;
  if (degree == 0) {
    throw std::invalid_argument("static: a context of " + std::to_string(problem.max_length) +
                                " tokens does not fit on " + std::to_string(problem.num_ranks) +
                                " ranks at " + std::to_string(problem.tokens_per_rank) +
                                " tokens each: raise tokens_per_rank or add ranks");
  }
  Packed packed = packed_in_order(problem, degree);
  const int64_t num_groups = problem.num_ranks / degree;
  std::vector<int32_t> ring(index(degree));
  Plan plan;
  const auto num_bins = index(packed.num_bins());
  plan.reserve(num_bins, num_bins * ring.size(), problem.lengths.size());
  for (std::size_t id = 0; id < problem.lengths.size(); ++id) {
    if (fits(problem, problem.lengths[id], degree)) continue;
    add_alone(problem, static_cast<SequenceId>(id), plan);
  }
  for (int64_t bin = 0; bin < packed.num_bins(); ++bin) {
    std::iota(ring.begin(), ring.end(), static_cast<int32_t>(bin % num_groups * degree));
    packed.open(bin, ring, plan);
  }
  for (std::size_t id = 0; id < problem.lengths.size(); ++id) {
    if (fits(problem, problem.lengths[id], degree)) packed.put(static_cast<SequenceId>(id), plan);
  }
  return plan;
}

double static_mesh_bound_s(const Problem& problem) {
  const int64_t degree = static_degree(problem);
  if (degree == 0) return kInfinity;
  double attention = 0;
  double compute = 0;
  double tokens = 0;
  for (const int64_t length : problem.lengths) {
    attention += attention_s(problem.cost, length);
    compute += compute_s(problem.cost, length);
    tokens += static_cast<double>(length);
  }
  // traffic that one micro-batch exposes cannot hide in another, so this is the least
  const double rate = total_speed(problem) / static_cast<double>(degree);
  const double slowest =
      problem.speeds.empty() ? 1 : *std::min_element(problem.speeds.begin(), problem.speeds.end());
  const double transfer =
      transfer_s(problem.cost, degree, tokens, best_links(problem.cost, degree));
  const auto d = static_cast<double>(degree);
  const double exposed = transfer * slowest - (d - 1) / d * attention / d;
  return (compute / d + std::max(0.0, exposed)) / rate;
}

}  // namespace hdp
