#include "planner/base/memory.hpp"

#include <algorithm>
#include <cmath>

#include "planner/base/cost_model.hpp"
#include "planner/base/slices.hpp"

namespace hdp {
namespace {

// Layers whose activations always stay: the one that computes and the one that is being copied.
constexpr int64_t kResidentLayers = 2;

// Ratios are multiples of it: 1 - ratio is then exact, however many layers it is multiplied by.
constexpr double kRatioStep = 0x1p-32;

// Activations of no bytes are those of a cost model that does not know them: they stay. So do those
// that might run beside a stream of another rank of their domain, where no layer's may leave.
bool may_offload(const Problem& problem) {
  const bool are_dealt = problem.expert_ranks > 1 && problem.pipeline_stages > 1;
  if (problem.streams && are_dealt) return false;
  return problem.offload && problem.cost.activation_bytes_per_token > 0 &&
         problem.cost.num_layers > kResidentLayers;
}

// Tokens of a sequence whose activations reach the host within its forward time on one rank.
double tokens_to_host(const Problem& problem, int64_t length) {
  const double forward_s = compute_s(problem.cost, length) / 3;
  return problem.cost.host_bytes_per_s * forward_s / problem.cost.activation_bytes_per_token;
}

// The least ratio at which so many tokens, more than the capacity, fit.
double least_ratio(const Problem& problem, int64_t tokens) {
  const auto capacity = static_cast<double>(problem.tokens_per_rank);
  const auto layers = static_cast<double>(problem.cost.num_layers);
  const auto held = static_cast<double>(tokens);
  const double exact = (held - capacity) / held * layers / (layers - kResidentLayers);
  double ratio = std::min(1.0, std::ceil(exact / kRatioStep) * kRatioStep);
  while (ratio < 1 && held * resident_share(problem, ratio) > capacity) ratio += kRatioStep;
  return ratio;
}

}  // namespace

double resident_share(const Problem& problem, double offload_ratio) {
  const auto layers = static_cast<double>(problem.cost.num_layers);
  const double kept = std::min(layers, static_cast<double>(kResidentLayers));
  return (kept + (1 - offload_ratio) * (layers - kept)) / layers;
}

std::optional<double> offload_ratio(const Problem& problem, int64_t length, int64_t degree) {
  const int64_t tokens = slice_tokens(length, degree, problem.slice_multiple);
  const int64_t capacity = problem.tokens_per_rank;
  if (tokens <= capacity) return 0;
  if (!may_offload(problem)) return std::nullopt;
  if (tokens * kResidentLayers > capacity * problem.cost.num_layers) return std::nullopt;
  const double leaving = static_cast<double>(tokens - capacity) * static_cast<double>(degree);
  if (leaving > tokens_to_host(problem, length)) return std::nullopt;
  const double bytes =
      static_cast<double>(tokens - capacity) * problem.cost.activation_bytes_per_token;
  if (bytes > problem.host_memory_bytes) return std::nullopt;
  return least_ratio(problem, tokens);
}

int64_t least_degree(const Problem& problem, int64_t length) {
  const int64_t capacity = problem.tokens_per_rank;
  const int64_t without = least_degree(length, capacity, problem.slice_multiple);
  if (without == 1 || !may_offload(problem)) return without;
  if (offload_ratio(problem, length, 1)) return 1;
  const int64_t most_tokens = capacity * problem.cost.num_layers / kResidentLayers;
  const int64_t by_memory = least_degree(length, most_tokens, problem.slice_multiple);
  if (by_memory == 0) return without;
  // all slices together hold at least `length` tokens
  const double too_many = static_cast<double>(length) - tokens_to_host(problem, length);
  const double by_time = std::max(2.0, std::floor(too_many / static_cast<double>(capacity)));
  const int64_t last = without == 0 ? problem.num_ranks : without - 1;
  for (auto d = std::max(by_memory, static_cast<int64_t>(by_time)); d <= last; ++d) {
    if (offload_ratio(problem, length, d)) return d;
  }
  return without;
}

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

double recomputed_share(const CostModel& cost) {
  if (cost.input_share == 0) return 1;
  return std::min(1.0, cost.input_share + 1 / static_cast<double>(cost.num_layers));
}

bool recomputes(const Problem& problem, int64_t length, int64_t degree) {
  if (!problem.recompute || offload_ratio(problem, length, degree)) return false;
  const auto tokens = static_cast<double>(slice_tokens(length, degree, problem.slice_multiple));
  return tokens * recomputed_share(problem.cost) <= static_cast<double>(problem.tokens_per_rank);
}

int64_t least_recomputed_degree(const Problem& problem, int64_t length) {
  const auto most = static_cast<int64_t>(static_cast<double>(problem.tokens_per_rank) /
                                         recomputed_share(problem.cost));
  // padding may make a wider slice the first that fits, and offload a narrower one
  int64_t degree = 1;
  if (!problem.offload) {
    degree = std::max<int64_t>(1, least_degree(length, most, problem.slice_multiple));
  }
  for (; degree <= problem.num_ranks; ++degree) {
    if (offload_ratio(problem, length, degree) || recomputes(problem, length, degree))
      return degree;
  }
  return 0;
}

bool rings_hold_all(const Problem& problem) {
  return std::all_of(problem.lengths.begin(), problem.lengths.end(), [&](int64_t length) {
    const int64_t least = least_degree(problem, length);
    return least >= 1 && least <= problem.num_ranks;
  });
}

}  // namespace hdp
