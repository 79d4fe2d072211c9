#include "planner/base/stream.hpp"

#include <algorithm>
#include <cmath>

#include "planner/base/cost_model.hpp"
#include "planner/base/memory.hpp"
#include "planner/base/parts.hpp"
#include "planner/base/slices.hpp"

namespace hdp {
namespace {

constexpr int64_t kMostParts = int64_t{1} << 20;

// Bytes of a ring's buffers for one layer's key or value in 16 bits: twice that and its gradient in
// 32, per byte of it.
constexpr double kBufferedPerKey = 6;

// Bytes of one layer's gradients of all earlier keys on the device, as they are found and added up.
constexpr double kFoundPerKey = 3;

// Bytes kept per byte of keys and values: these, and the sums of their gradients. As many come back
// from the host in backward, where the sums return.
double kept_per_key(const CostModel& cost) { return 1 + cost.sum_ratio; }

// Bytes of the keys and values before a part in layers with a window, of which a ring sends six
// times as many: before two chunks, forward, and backward they and their gradients.
double halo_key_bytes(const CostModel& cost) {
  return cost.halo_s * cost.inter_node_bytes_per_s / 6;
}

// Bytes that a rank keeps on the host of a stream that has `held` tokens on it.
double host_bytes(const CostModel& cost, const Stream& stream, double held) {
  const double parts = static_cast<double>(stream.host_parts);
  const double tokens = parts / static_cast<double>(stream.num_parts) * held;
  return kept_per_key(cost) * (tokens * cost.kv_bytes_per_token + parts * halo_key_bytes(cost));
}

// What is kept on the device, in tokens whose activations take as much.
struct Kept {
  double per_token = 0;
  double per_part = 0;    // of layers with a window
  double in_buffers = 0;  // of a ring, per token of earlier parts whose keys travel
  double found = 0;       // per token of earlier parts whose keys lie one behind another
  double inputs = 0;      // per token: of a stage of several, what each part has come with

  explicit Kept(const Problem& problem) {
    const CostModel& cost = problem.cost;
    if (problem.pipeline_stages > 1) {
      inputs = static_cast<double>(problem.model_chunks) * cost.input_share /
               static_cast<double>(cost.num_layers);
    }
    if (cost.activation_bytes_per_token == 0) return;
    const double keys = cost.kv_bytes_per_token / cost.activation_bytes_per_token;
    per_token = kept_per_key(cost) * keys;
    per_part = kept_per_key(cost) * halo_key_bytes(cost) / cost.activation_bytes_per_token;
    in_buffers = kBufferedPerKey * keys / static_cast<double>(cost.num_layers);
    found = kFoundPerKey * keys / static_cast<double>(cost.num_layers);
  }
};

// Calls visit(part, sent, passes, from_host): the tokens whose keys and values take as many bytes
// as go around for the part; how often something does: of a stream with keys on the host, those of
// each earlier part go around by themselves, the first ones with the part's own; and the tokens of
// earlier parts that come from there.
template <typename Visit>
void for_each_part(const CostModel& cost, int64_t length, const Stream& stream,
                   const Visit& visit) {
  const auto s = static_cast<double>(length);
  const double tokens = s / static_cast<double>(stream.num_parts);
  const double query_ratio = stream.on_host() ? 0 : cost.query_ratio;
  const double on_device = static_cast<double>(stream.num_parts - stream.host_parts) * tokens;
  double begin = 0;
  for (int64_t number = 1; number <= stream.num_parts; ++number) {
    const double end = number < stream.num_parts ? static_cast<double>(number) * tokens : s;
    const PartSize part{end - begin, begin, end * end - begin * begin};
    const int64_t passes = stream.on_host() ? std::max<int64_t>(1, number - 1) : 1;
    visit(part, traffic_tokens(part, query_ratio), static_cast<double>(passes),
          std::max(0.0, begin - on_device));
    begin = end;
  }
}

// A sequence on so many ranks, in as few parts as fit.
class InParts {
 public:
  InParts(const Problem& problem, int64_t length, int64_t degree)
      : problem_(problem),
        kept_(problem),
        on_a_rank_((degree == 1 ? 1 : 2) * problem.slice_multiple),
        units_(ceil_div(length, degree * on_a_rank_)),
        held_(static_cast<double>(units_ * on_a_rank_)),
        capacity_(static_cast<double>(problem.tokens_per_rank) - kept_.inputs * held_),
        // keys of earlier parts lie in a ring's buffers as long as they, not queries, travel
        buffered_(degree == 1 ? 0 : kept_.in_buffers) {}

  // In at least `fewest` parts, with all that is kept on the device.
  std::optional<Stream> on_device(int64_t fewest) const {
    const double ratio = problem_.cost.query_ratio;
    const double of_parts = ratio > 0 ? 1 + buffered_ * std::max(0.0, ratio - 1) : 1;
    const double of_all = kept_.per_token + kept_.found + (ratio > 0 ? 0 : buffered_);
    return found((capacity_ - of_all * held_) / of_parts, kept_.per_part / of_parts, fewest);
  }

  // In as many, or in twice as many of which the first ones keep on the device what it has room for.
  std::optional<Stream> on_host(int64_t fewest) const {
    if (!problem_.offload) return std::nullopt;
    std::optional<Stream> host = found(capacity_, 0, fewest);
    if (!host) return std::nullopt;
    const int64_t num_parts = std::min({2 * host->num_parts, units_, kMostParts});
    const auto tokens = static_cast<double>(in(num_parts, 0).tokens_on_a_rank);
    const double of_a_part = kept_.per_token * tokens + kept_.per_part;
    const double room = capacity_ - tokens;
    const auto on_device = static_cast<int64_t>(
        std::min(room / std::max(of_a_part, 1e-300), static_cast<double>(num_parts - 1)));
    if (on_device > 0) {
      host = in(num_parts, num_parts - on_device);
    } else {
      host->host_parts = host->num_parts;
    }
    if (host_bytes(problem_.cost, *host, held_) > problem_.host_memory_bytes) return std::nullopt;
    return host;
  }

  // In so many.
  Stream in(int64_t num_parts, int64_t host_parts) const {
    return {num_parts, host_parts, ceil_div(units_, num_parts) * on_a_rank_};
  }

  // As `stream_of` says of one stage.
  std::optional<Stream> in_fewest() const {
    const std::optional<Stream> device = on_device(1);
    const std::optional<Stream> host = on_host(1);
    if (!host || (device && device->num_parts <= host->num_parts)) return device;
    return host;
  }

 private:
  // In at least `fewest` parts, each with `beside` of the capacity, that fit into `tokens`.
  std::optional<Stream> found(double tokens, double beside, int64_t fewest) const {
    for (int64_t num_parts = std::min(fewest, units_);;) {
      const double room = tokens - beside * static_cast<double>(num_parts);
      const auto most = static_cast<int64_t>(room / static_cast<double>(on_a_rank_));
      if (!(room > 0) || most == 0) return std::nullopt;
      const int64_t needed = ceil_div(units_, most);
      if (needed > kMostParts) return std::nullopt;
      if (needed <= num_parts) {
        if (num_parts < 2) return std::nullopt;
        return in(num_parts, 0);
      }
      num_parts = needed;
    }
  }

  const Problem& problem_;
  Kept kept_;
  int64_t on_a_rank_;
  int64_t units_;
  double held_;
  double capacity_;
  double buffered_;
};

// With stages, in up to so many parts for each of them: a shorter part is sooner at the next stage.
constexpr int64_t kPartsOfAStage = 16;

// What a stream takes on all stages and, before and behind that, its longest part on the others.
double pass_s(const Problem& problem, int64_t length, int64_t degree, const Stream& stream) {
  const double seconds =
      stream_s(problem, length, degree, stream, likely_links(problem.cost, degree));
  return seconds + static_cast<double>(problem.pipeline_stages - 1) *
                       longest_part_s(problem, length, stream, seconds);
}

// Whether there may be a stream of the sequence on so many ranks.
bool is_wanted(const Problem& problem, int64_t length, int64_t degree) {
  if (!problem.streams || offload_ratio(problem, length, degree)) return false;
  if (problem.pipeline_stages > 1 && problem.cost.input_share == 0) return false;
  return !recomputes(problem, length, degree);  // in fewer launches
}

}  // namespace

std::optional<Stream> stream_of(const Problem& problem, int64_t length, int64_t degree) {
  if (!is_wanted(problem, length, degree)) return std::nullopt;
  const InParts in_parts(problem, length, degree);
  if (problem.pipeline_stages == 1) return in_parts.in_fewest();
  std::optional<Stream> best;
  double least_s = kInfinity;
  const int64_t most = kPartsOfAStage * problem.pipeline_stages;
  for (int64_t fewest = 1; fewest <= most; fewest *= 2) {
    for (const auto& found : {in_parts.on_device(fewest), in_parts.on_host(fewest)}) {
      if (!found || (best && found->num_parts == best->num_parts)) continue;
      const double found_s = pass_s(problem, length, degree, *found);
      if (found_s >= least_s) continue;
      best = found;
      least_s = found_s;
    }
  }
  return best;
}

Stream planned_stream(const Problem& problem, const Plan& plan, int64_t micro_batch) {
  const int64_t num_parts = plan.parts_of_stream(micro_batch);
  const double on_host = plan.offload_ratio(micro_batch) * static_cast<double>(num_parts);
  return InParts(problem, problem.lengths[index(*plan.sharded(micro_batch).begin())],
                 static_cast<int64_t>(plan.ring(micro_batch).size()))
      .in(num_parts, std::llround(on_host));
}

bool may_stream(const Problem& problem, int64_t length, int64_t degree) {
  return is_wanted(problem, length, degree) &&
         InParts(problem, length, degree).in_fewest().has_value();
}

double growth_of_stream(const Problem& problem, int64_t length) {
  const auto tokens = static_cast<double>(length);
  return tokens / (tokens + problem.linear_tokens);
}

double longest_part_s(const Problem& problem, int64_t length, const Stream& stream,
                      double seconds) {
  const PartTimes part_s(seconds, stream.num_parts, growth_of_stream(problem, length));
  return part_s.of(stream.num_parts - 1);
}

int64_t least_stream_degree(const Problem& problem, int64_t length) {
  for (int64_t degree = 1; degree <= problem.num_ranks; ++degree) {
    if (may_stream(problem, length, degree)) return degree;
  }
  return 0;
}

double stream_s(const Problem& problem, int64_t length, int64_t degree, const Stream& stream,
                Links links, double speed) {
  const CostModel& cost = problem.cost;
  const auto d = static_cast<double>(degree);
  const auto s = static_cast<double>(length);
  double fixed = fixed_s(cost, degree, s, stream.num_parts) + merge_s(cost, degree, s);
  const auto parts = static_cast<double>(stream.num_parts);
  const double more = (parts - 1) * (parts - 2) / 2;
  // each part but the first makes keys of latents again, as if they travelled
  fixed += cost.projection_b * s * (1 - 1 / parts);
  // a block a step, and a merged result, for each earlier part; on the device for all of them, but
  // keys are made of each one's latents
  fixed += stream.on_host() ? more * (d * cost.block_all_layers_s + cost.merge_b * s / parts)
                            : more * cost.projection_b * s / parts;
  const double computed = (compute_s(cost, length) / d + fixed) / speed;
  const double attention = attention_s(cost, length);
  double exposed = 0;
  const auto expose = [&](const PartSize& part, double around, double passes, double from_host) {
    const double attended = attention * (part.squares / (s * s)) / d / speed / 3;
    if (degree > 1) {
      const double hiding = (d - 1) / d * attended;
      const double sent = (d - 1) / d * around * cost.kv_bytes_per_token / links.bytes_per_s;
      const double hops = passes * (d - 1) * links.hop_s;
      exposed += 2 * std::max(0.0, hops + sent - hiding) +
                 std::max(0.0, hops + 2 * sent - 2 * hiding) + home_s(cost, degree, around, links);
    }
    if (from_host > 0) {
      const double hiding = attended + cost.linear_s_per_token * part.tokens / d / speed / 3;
      const double bytes = from_host * cost.kv_bytes_per_token / d + halo_key_bytes(cost);
      const double copied = bytes / cost.host_bytes_per_s;
      exposed += 2 * std::max(0.0, copied - hiding) +
                 std::max(0.0, kept_per_key(cost) * copied - 2 * hiding);
    }
  };
  for_each_part(cost, length, stream, expose);
  return kComputedTwice * computed + exposed;
}

double stream_traffic_tokens(const CostModel& cost, int64_t length, const Stream& stream) {
  double tokens = 0;
  for_each_part(cost, length, stream,
                [&](const PartSize&, double around, double, double) { tokens += around; });
  return tokens;
}

}  // namespace hdp
