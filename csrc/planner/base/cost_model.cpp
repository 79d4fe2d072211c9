#include "planner/base/cost_model.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <vector>

namespace hdp {

double attention_s(const CostModel& cost, int64_t length) {
  if (!cost.attention.empty()) return cost.attention.seconds(length);
  const auto s = static_cast<double>(length);
  return cost.a * s * s;
}

double attention_per_token_s(const CostModel& cost, int64_t length) {
  const auto s = static_cast<double>(length);
  return cost.attention.empty() ? cost.a * s : cost.attention.seconds(length) / s;
}

double compute_s(const CostModel& cost, int64_t length) {
  return attention_s(cost, length) + cost.b * static_cast<double>(length);
}

double transfer_s(const CostModel& cost, int64_t degree, double tokens, bool one_node) {
  const auto d = static_cast<double>(degree);
  const double bandwidth = one_node ? cost.intra_node_bytes_per_s : cost.inter_node_bytes_per_s;
  return 3 * (d - 1) / d * tokens * cost.kv_bytes_per_token / bandwidth;
}

double ring_s(const CostModel& cost, int64_t length, int64_t degree, bool one_node, double speed) {
  const double rate = speed * static_cast<double>(degree);
  const double transfer = transfer_s(cost, degree, static_cast<double>(length), one_node);
  return compute_s(cost, length) / rate +
         std::max(0.0, transfer - attention_s(cost, length) / rate);
}

int64_t greatest_hidden_degree(const CostModel& cost, int64_t length, int64_t num_ranks) {
  // transfer <= attention  <=>  D - 1 <= attention per token x bandwidth / (3 KV bytes)
  const double per_token_s = attention_per_token_s(cost, length);
  const auto limit = [&](double bandwidth) {
    if (cost.kv_bytes_per_token == 0) return num_ranks;
    const double hops = per_token_s * bandwidth / (3 * cost.kv_bytes_per_token);
    return hops >= static_cast<double>(num_ranks) ? num_ranks : 1 + static_cast<int64_t>(hops);
  };
  const int64_t across = std::min(num_ranks, limit(cost.inter_node_bytes_per_s));
  if (across > cost.ranks_per_node) return across;
  return std::min({num_ranks, cost.ranks_per_node, limit(cost.intra_node_bytes_per_s)});
}

namespace {

constexpr int64_t kLongest = int64_t{1} << 41;

// length_within for a table, where kLongest takes more.
int64_t length_on_table(const CostModel& cost, double seconds) {
  const std::vector<AttentionPoint>& points = cost.attention.points();
  const auto above =
      std::partition_point(points.begin(), points.end(), [&](const AttentionPoint& point) {
        return compute_s(cost, point.length) <= seconds;
      });
  int64_t low = above == points.begin() ? 0 : std::prev(above)->length;
  int64_t high = above == points.end() ? kLongest : above->length;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (compute_s(cost, middle) <= seconds ? low : high) = middle;
  }
  return low;
}

}  // namespace

int64_t length_within(const CostModel& cost, double seconds) {
  if (compute_s(cost, kLongest) <= seconds) return kLongest;
  if (!cost.attention.empty()) return length_on_table(cost, seconds);
  // a s^2 + b s = t, in the form that does not cancel and allows a = 0
  const double root = std::sqrt(cost.b * cost.b + 4 * cost.a * seconds);
  auto length = static_cast<int64_t>(2 * seconds / (cost.b + root));
  while (length > 0 && compute_s(cost, length) > seconds) --length;
  return length;
}

double total_compute_s(const Problem& problem) {
  double total = 0;
  for (const int64_t length : problem.lengths) total += compute_s(problem.cost, length);
  return total;
}

double total_speed(const Problem& problem) {
  if (problem.speeds.empty()) return static_cast<double>(problem.num_ranks);
  return std::accumulate(problem.speeds.begin(), problem.speeds.end(), 0.0);
}

}  // namespace hdp
