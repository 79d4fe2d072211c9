#include "planner/base/stream.hpp"

#include <algorithm>

#include "planner/base/cost_model.hpp"
#include "planner/base/memory.hpp"
#include "planner/base/parts.hpp"
#include "planner/base/slices.hpp"

namespace hdp {
namespace {

constexpr int64_t kMostParts = int64_t{1} << 20;

// Keys and values in 16 bits and the sums of their gradients in 32, per byte of the first.
constexpr double kKeptPerKey = 3;

// Layers whose kept keys lie in the buffers of a ring besides.
constexpr double kLayersInBuffers = 2;

// Of a token that earlier parts hold: copied to the device in each forward; in backward that and
// the gradients' sums, which return.
constexpr double kBackPerKey = 3;

// What keys and values that a stream keeps take, per token, in tokens whose activations do.
double kept_share(const CostModel& cost) {
  if (cost.activation_bytes_per_token == 0) return 0;
  const double layers = 1 + kLayersInBuffers / static_cast<double>(cost.num_layers);
  return kKeptPerKey * layers * cost.kv_bytes_per_token / cost.activation_bytes_per_token;
}

// Calls visit(part, sent, passes): the tokens whose keys and values take as many bytes as go around
// for the part, and how often something does: kept on the host, keys of each earlier part go around
// by themselves, the first ones with the part's own.
template <typename Visit>
void for_each_part(const CostModel& cost, int64_t length, const Stream& stream,
                   const Visit& visit) {
  const auto s = static_cast<double>(length);
  const double tokens = s / static_cast<double>(stream.num_parts);
  const double query_ratio = stream.on_host ? 0 : cost.query_ratio;
  double begin = 0;
  for (int64_t number = 1; number <= stream.num_parts; ++number) {
    const double end = number < stream.num_parts ? static_cast<double>(number) * tokens : s;
    const PartSize part{end - begin, begin, end * end - begin * begin};
    const int64_t passes = stream.on_host ? std::max<int64_t>(1, number - 1) : 1;
    visit(part, traffic_tokens(part, query_ratio), static_cast<double>(passes));
    begin = end;
  }
}

}  // namespace

std::optional<Stream> stream_of(const Problem& problem, int64_t length, int64_t degree) {
  if (!problem.streams || offload_ratio(problem, length, degree)) return std::nullopt;
  if (recomputes(problem, length, degree)) return std::nullopt;  // in fewer launches
  const int64_t on_a_rank = (degree == 1 ? 1 : 2) * problem.slice_multiple;
  const int64_t units = ceil_div(length, degree * on_a_rank);
  const auto in_parts = [&](double tokens, bool on_host) -> std::optional<Stream> {
    const auto most = static_cast<int64_t>(tokens / static_cast<double>(on_a_rank));
    if (!(tokens > 0) || most == 0) return std::nullopt;
    const int64_t num_parts = ceil_div(units, most);
    if (num_parts < 2 || num_parts > kMostParts) return std::nullopt;
    return Stream{num_parts, on_host, ceil_div(units, num_parts) * on_a_rank};
  };
  const auto capacity = static_cast<double>(problem.tokens_per_rank);
  const double kept = kept_share(problem.cost) * static_cast<double>(units * on_a_rank);
  const std::optional<Stream> device = in_parts(capacity - kept, false);
  if (!problem.offload) return device;
  const std::optional<Stream> host = in_parts(capacity, true);
  return device && (!host || device->num_parts <= 2 * host->num_parts) ? device : host;
}

int64_t least_stream_degree(const Problem& problem, int64_t length) {
  for (int64_t degree = 1; degree <= problem.num_ranks; ++degree) {
    if (stream_of(problem, length, degree)) return degree;
  }
  return 0;
}

double stream_s(const Problem& problem, int64_t length, int64_t degree, const Stream& stream,
                Links links, double speed) {
  const CostModel& cost = problem.cost;
  const auto d = static_cast<double>(degree);
  const auto s = static_cast<double>(length);
  double fixed = fixed_s(cost, degree, s, stream.num_parts) + merge_s(cost, degree, s);
  if (stream.on_host) {  // a block a step, and a merged result, for each earlier part
    const auto parts = static_cast<double>(stream.num_parts);
    const double more = (parts - 1) * (parts - 2) / 2;
    fixed += more * (d * cost.block_all_layers_s + cost.merge_b * s / parts);
  }
  const double computed = (compute_s(cost, length) / d + fixed) / speed;
  const double attention = attention_s(cost, length);
  const double bandwidth = bandwidth_of(cost, links);
  const double hop = hop_s(cost, links);
  double exposed = 0;
  for_each_part(cost, length, stream, [&](const PartSize& part, double around, double passes) {
    const double attended = attention * (part.squares / (s * s)) / d / speed / 3;
    if (degree > 1) {
      const double hiding = (d - 1) / d * attended;
      const double sent = (d - 1) / d * around * cost.kv_bytes_per_token / bandwidth;
      const double hops = passes * (d - 1) * hop;
      exposed += 2 * std::max(0.0, hops + sent - hiding) +
                 std::max(0.0, hops + 2 * sent - 2 * hiding) + home_s(cost, degree, around, links);
    }
    if (stream.on_host) {
      const double hiding = attended + cost.linear_s_per_token * part.tokens / d / speed / 3;
      const double copied = part.earlier * cost.kv_bytes_per_token / d / cost.host_bytes_per_s;
      exposed += 2 * std::max(0.0, copied - hiding) +
                 std::max(0.0, kBackPerKey * copied - 2 * hiding);
    }
  });
  return kComputedTwice * computed + exposed;
}

double stream_traffic_tokens(const CostModel& cost, int64_t length, const Stream& stream) {
  double tokens = 0;
  for_each_part(cost, length, stream,
                [&](const PartSize&, double around, double) { tokens += around; });
  return tokens;
}

}  // namespace hdp
