#include "planner/base/cost_model.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <vector>

namespace hdp {
namespace {

// Seconds of s^2 that layers with a window w leave out: s^2 - w (2 s - w) = (s - w)^2.
double unseen_s(const CostModel& cost, double length) {
  if (cost.window_share == 0) return 0;
  const double beyond = std::max(0.0, length - static_cast<double>(cost.window_tokens));
  return cost.window_share * cost.a * beyond * beyond;
}

}  // namespace

double attention_s(const CostModel& cost, int64_t length) {
  if (!cost.attention.empty()) return cost.attention.seconds(length);
  const auto s = static_cast<double>(length);
  return cost.a * s * s - unseen_s(cost, s) + cost.attention_b * s;
}

double attention_per_token_s(const CostModel& cost, int64_t length) {
  const auto s = static_cast<double>(length);
  return cost.attention.empty() ? cost.a * s - unseen_s(cost, s) / s + cost.attention_b
                                : cost.attention.seconds(length) / s;
}

double compute_s(const CostModel& cost, int64_t length) {
  return attention_s(cost, length) + cost.linear_s_per_token * static_cast<double>(length);
}

double fixed_s(const CostModel& cost, int64_t degree) {
  const double halo_s = degree > 1 ? cost.halo_s : 0;
  return cost.g + static_cast<double>(degree) * cost.block_all_layers_s + halo_s;
}

double merge_s(const CostModel& cost, int64_t degree, double tokens) {
  const auto d = static_cast<double>(degree);
  return cost.merge_b * tokens * (d - 1) / d;
}

bool width_costs(const CostModel& cost) {
  return cost.block_all_layers_s > 0 || cost.merge_b > 0 || cost.intra_node_hop_all_layers_s > 0 ||
         cost.inter_node_hop_all_layers_s > 0;
}

Links links_in_a_node(const CostModel& cost) {
  return {cost.intra_node_bytes_per_s, cost.intra_node_hop_all_layers_s, 0};
}

Links links_between_nodes(const CostModel& cost, int64_t number) {
  const double one = cost.inter_node_bytes_per_s;
  if (!cost.double_rings || number == 1) return {one, cost.inter_node_hop_all_layers_s, 0};
  const double all = std::min(cost.intra_node_bytes_per_s, static_cast<double>(number) * one);
  return {all, cost.inter_node_hop_all_layers_s, std::max(0.0, 1 / one - 1 / all)};
}

Links links_of(const CostModel& cost, Span ring) {
  const auto node = [&](const int32_t* rank) { return *rank / cost.ranks_per_node; };
  int64_t number = 0;  // what the runs of members in one node have in common
  int64_t run = 1;
  for (const int32_t* next = ring.begin() + 1; next != ring.end(); ++next, ++run) {
    if (node(next) == node(next - 1)) continue;
    if (!cost.double_rings) return links_between_nodes(cost, 1);
    number = std::gcd(number, run);
    run = 0;
  }
  return number == 0 ? links_in_a_node(cost) : links_between_nodes(cost, std::gcd(number, run));
}

Links links_of_block(const CostModel& cost, int64_t first, int64_t degree) {
  const int64_t begin = first % cost.ranks_per_node;
  if (begin + degree <= cost.ranks_per_node) return links_in_a_node(cost);
  return links_between_nodes(cost, std::gcd(std::gcd(begin, begin + degree), cost.ranks_per_node));
}

Links likely_links(const CostModel& cost, int64_t degree) {
  return links_of_block(cost, 0, degree);
}

Links best_links(const CostModel& cost, int64_t degree) {
  if (degree <= cost.ranks_per_node) return links_in_a_node(cost);
  Links links = links_between_nodes(cost, cost.ranks_per_node);
  links.bytes_per_s = std::max(links.bytes_per_s, cost.inter_node_bytes_per_s);
  links.home_s_per_byte = 0;
  return links;
}

double transfer_s(const CostModel& cost, int64_t degree, double tokens, Links links) {
  const auto d = static_cast<double>(degree);
  return 3 * (d - 1) / d * tokens * cost.kv_bytes_per_token / links.bytes_per_s;
}

double home_s(const CostModel& cost, int64_t degree, double tokens, Links links) {
  return tokens / static_cast<double>(degree) * cost.kv_bytes_per_token * links.home_s_per_byte;
}

double exposed_s(const CostModel& cost, int64_t degree, double tokens, double attention_s,
                 Links links, double num_forwards) {
  const auto d = static_cast<double>(degree);
  const double hops = d - 1;
  const double latency = hops * links.hop_s;
  const double third = transfer_s(cost, degree, tokens, links) / 3;
  const double hiding = hops / d * attention_s / 3;
  return num_forwards * std::max(0.0, latency + third - hiding) +
         std::max(0.0, latency + 2 * third - 2 * hiding) + home_s(cost, degree, tokens, links);
}

double spared_s(const CostModel& cost, int64_t degree, double tokens, double attention_s,
                Links links) {
  if (cost.made_bytes_per_token == 0 || degree == 1 || tokens == 0) return 0;
  const auto d = static_cast<double>(degree);
  const double hops = d - 1;
  const double passed = hops / d * tokens;
  const double spared = cost.projection_b * passed -
                        tokens / d * cost.made_bytes_per_token * links.home_s_per_byte;
  const double hidden = hops / d * attention_s / 3 - hops * links.hop_s -
                        passed * cost.kv_bytes_per_token / links.bytes_per_s;
  if (spared <= 0 || hidden <= 0) return 0;
  return spared * std::min(1.0, hidden * links.bytes_per_s / (passed * cost.made_bytes_per_token));
}

double ring_s(const CostModel& cost, int64_t length, int64_t degree, Links links, double speed) {
  const double shared = attention_s(cost, length) / static_cast<double>(degree);
  const auto tokens = static_cast<double>(length);
  const double made = merge_s(cost, degree, tokens) - spared_s(cost, degree, tokens, shared, links);
  return compute_s(cost, length) / (speed * static_cast<double>(degree)) + made / speed +
         exposed_s(cost, degree, tokens, shared / speed, links);
}

namespace {

double parts_within(const CostModel& cost, double merge, double compute_s, double seconds) {
  if (merge > 0) {  // compute / D + merge (1 - 1 / D) = (compute - merge) / D + merge
    if (compute_s <= merge) return compute_s + cost.block_all_layers_s <= seconds ? 1 : kInfinity;
    if (seconds <= merge) return kInfinity;
    compute_s -= merge;
    seconds -= merge;
  }
  if (cost.block_all_layers_s == 0) return compute_s / seconds;
  // compute / D + D block = t, in the form that does not cancel
  const double square = seconds * seconds - 4 * cost.block_all_layers_s * compute_s;
  if (!(square >= 0)) return kInfinity;
  return 2 * compute_s / (seconds + std::sqrt(square));
}

}  // namespace

double parts_within(const CostModel& cost, int64_t length, double compute_s, double seconds) {
  const auto tokens = static_cast<double>(length);
  if (cost.made_bytes_per_token == 0) {
    return parts_within(cost, cost.merge_b * tokens, compute_s, seconds);
  }
  // the wider the ring, the fewer heads travel made: from below
  double merge = (cost.merge_b - cost.projection_b) * tokens;
  double parts = parts_within(cost, merge, compute_s, seconds);
  for (int i = 0; i < 3 && parts > 1 && parts < kInfinity; ++i) {
    const auto degree = static_cast<int64_t>(std::min(std::ceil(parts), 1e9));
    const double others = 1 - 1 / static_cast<double>(degree);
    const double shared = attention_s(cost, length) / static_cast<double>(degree);
    const Links links = best_links(cost, degree);
    const double spared = spared_s(cost, degree, tokens, shared, links) / others;
    parts = parts_within(cost, cost.merge_b * tokens - spared, compute_s, seconds);
  }
  return parts;
}

int64_t greatest_hidden_degree(const CostModel& cost, int64_t length, int64_t num_ranks) {
  // forward (backward has twice as much of all but latency), with y = D - 1 hops and D steps:
  // y (latency + sent / D) <= attention / D  <=>  latency y^2 + (latency + sent) y <= attention
  const double attention = attention_s(cost, length) / 3;
  const double bytes = static_cast<double>(length) * cost.kv_bytes_per_token;
  const auto limit = [&](double bandwidth, double latency) {
    const double one = latency + bytes / bandwidth;
    if (one == 0) return num_ranks;
    const double hops = 2 * attention / (one + std::sqrt(one * one + 4 * latency * attention));
    return hops >= static_cast<double>(num_ranks)
               ? num_ranks
               : std::min(num_ranks, 1 + static_cast<int64_t>(hops));
  };
  const Links links = best_links(cost, cost.ranks_per_node + 1);
  const int64_t across = limit(links.bytes_per_s, links.hop_s);
  if (across > cost.ranks_per_node) return across;
  return std::min(cost.ranks_per_node,
                  limit(cost.intra_node_bytes_per_s, cost.intra_node_hop_all_layers_s));
}

namespace {

constexpr int64_t kLongest = int64_t{1} << 41;

// length_within for a table, where kLongest takes more.
int64_t length_on_table(const CostModel& cost, double seconds) {
  const std::vector<AttentionPoint>& points = cost.attention.points();
  const auto above = std::partition_point(
      points.begin(), points.end(),
      [&](const AttentionPoint& point) { return compute_s(cost, point.length) <= seconds; });
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
  const double limit_s = seconds;
  if (compute_s(cost, kLongest) <= seconds) return kLongest;
  if (!cost.attention.empty()) return length_on_table(cost, seconds);
  // a s^2 + b s = t, in the form that does not cancel and allows a = 0
  double a = cost.a;
  double b = cost.attention_b + cost.linear_s_per_token;
  const auto window = static_cast<double>(cost.window_tokens);
  if (cost.window_share > 0 && compute_s(cost, cost.window_tokens) < seconds) {
    // beyond the window (1 - x) a s^2 + (b + 2 x a w) s = t + x a w^2
    const double inside = cost.window_share * a * window;
    a *= 1 - cost.window_share;
    b += 2 * inside;
    seconds += inside * window;
  }
  const double root = std::sqrt(b * b + 4 * a * seconds);
  auto length = static_cast<int64_t>(2 * seconds / (b + root));
  while (length > 0 && compute_s(cost, length) > limit_s) --length;
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
