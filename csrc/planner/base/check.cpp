#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "planner/base/memory.hpp"
#include "planner/base/stream.hpp"
#include "planner/base/types.hpp"

namespace hdp {
namespace {

constexpr int64_t kMostSequences = (int64_t{1} << 31) - 1;
constexpr int64_t kMostTokens = int64_t{1} << 40;
constexpr int64_t kMostRanks = int64_t{1} << 20;
constexpr int64_t kMostLayers = int64_t{1} << 20;
constexpr int64_t kMostStages = 1024;
constexpr int64_t kMostParts = 1024;
constexpr int64_t kMostEffort = 1'000'000;
constexpr double kLeastNumber = 1e-30;
constexpr double kGreatestNumber = 1e30;

std::string with_commas(int64_t value) {
  std::string text = std::to_string(value);
  const std::size_t first_digit = value < 0 ? 1 : 0;
  for (std::size_t end = text.size(); end > first_digit + 3; end -= 3) text.insert(end - 3, ",");
  return text;
}

void check_range(const std::string& name, int64_t value, int64_t greatest) {
  if (value >= 1 && value <= greatest) return;
  throw std::invalid_argument(name + " is " + with_commas(value) + "; expected 1 to " +
                              with_commas(greatest));
}

// The range keeps every sum of squares finite and every root exact enough.
void check_number(const std::string& name, double value, bool zero_allowed) {
  if (value >= kLeastNumber && value <= kGreatestNumber) return;
  if (zero_allowed && value == 0) return;
  std::ostringstream text;
  text << name << " is " << value << "; expected a finite number, " << (zero_allowed ? "0 or " : "")
       << kLeastNumber << " to " << kGreatestNumber;
  throw std::invalid_argument(text.str());
}

void check_attention_points(const CostModel& cost) {
  if (cost.attention.empty()) return;
  std::ostringstream text;
  text << "cost model: ";
  if (cost.a != 0 || cost.attention_b != 0) {
    text << (cost.a != 0 ? "a is " : "attention_b is ") << (cost.a != 0 ? cost.a : cost.attention_b)
         << " beside attention_points; expected 0: they say what attention takes, leave one of the "
         << "two out";
    throw std::invalid_argument(text.str());
  }
  AttentionPoint last;
  for (const AttentionPoint& point : cost.attention.points()) {
    check_range("cost model: length of a point of attention_points", point.length, kMostTokens);
    const std::string tokens = with_commas(point.length) + " tokens";
    if (point.length <= last.length) {
      text << "attention_points has " << tokens << " behind " << with_commas(last.length)
           << "; expected ascending lengths: sort the points, keep one of each length";
      throw std::invalid_argument(text.str());
    }
    if (!(point.seconds >= last.seconds && point.seconds <= kGreatestNumber)) {
      text << "attention_points has " << point.seconds << " s for " << tokens
           << "; expected a finite number of at least " << last.seconds << " s, which "
           << with_commas(last.length) << " tokens take, and at most " << kGreatestNumber;
      throw std::invalid_argument(text.str());
    }
    last = point;
  }
}

void check_cost_model(const CostModel& cost) {
  const std::pair<const char*, double> may_be_zero[] = {
      {"a", cost.a},
      {"b + b_experts", cost.linear_s_per_token},
      {"g", cost.g},
      {"attention_b", cost.attention_b},
      {"block_s of all layers", cost.block_all_layers_s},
      {"intra_node_hop_s of all layers", cost.intra_node_hop_all_layers_s},
      {"inter_node_hop_s of all layers", cost.inter_node_hop_all_layers_s},
      {"merge_b", cost.merge_b},
      {"b_experts", cost.b_experts},
      {"kv_bytes_per_token", cost.kv_bytes_per_token},
      {"window_share", cost.window_share},
      {"halo_s", cost.halo_s},
      {"query_ratio", cost.query_ratio},
      {"input_share", cost.input_share},
      {"projection_b", cost.projection_b},
      {"made_bytes_per_token", cost.made_bytes_per_token},
      {"sum_ratio", cost.sum_ratio},
      {"activation_bytes_per_token", cost.activation_bytes_per_token},
  };
  const std::string of = "cost model: ";
  for (const auto& [name, value] : may_be_zero) check_number(of + name, value, true);
  check_number(of + "intra_node_bytes_per_s", cost.intra_node_bytes_per_s, false);
  check_number(of + "inter_node_bytes_per_s", cost.inter_node_bytes_per_s, false);
  check_range(of + "ranks_per_node", cost.ranks_per_node, kMostRanks);
  check_number(of + "host_bytes_per_s", cost.host_bytes_per_s, false);
  check_range(of + "num_layers", cost.num_layers, kMostLayers);
  if (cost.window_tokens < 0 || !(cost.window_share <= 1)) {
    throw std::invalid_argument(of + "window_tokens is " + with_commas(cost.window_tokens) +
                                " and window_share " + std::to_string(cost.window_share) +
                                "; expected at least 0 tokens and a share of at most 1");
  }
  check_attention_points(cost);
}

void check_speeds(const Problem& problem) {
  if (problem.speeds.empty()) return;
  const auto num_speeds = static_cast<int64_t>(problem.speeds.size());
  if (num_speeds != problem.num_ranks) {
    throw std::invalid_argument("rank speeds has " + with_commas(num_speeds) +
                                " entries; expected one for each of " +
                                with_commas(problem.num_ranks) + " ranks");
  }
  for (std::size_t rank = 0; rank < problem.speeds.size(); ++rank) {
    check_number("speed of rank " + std::to_string(rank), problem.speeds[rank], false);
  }
}

void check_row_weights(const Problem& problem) {
  check_range("virtual stages", problem.model_chunks, kMostStages);
  if (problem.row_weights.empty()) return;
  const auto found = static_cast<int64_t>(problem.row_weights.size());
  const int64_t expected = problem.pipeline_stages * problem.model_chunks;
  if (found != expected) {
    throw std::invalid_argument("stage weights has " + with_commas(found) + " entries; expected " +
                                with_commas(expected) + ", one for each virtual stage");
  }
  for (std::size_t row = 0; row < problem.row_weights.size(); ++row) {
    check_number("weight of virtual stage " + std::to_string(row), problem.row_weights[row], true);
  }
}

void check_expert_ranks(const Problem& problem) {
  check_range("expert parallel size", problem.expert_ranks, problem.num_ranks);
  if (problem.num_ranks % problem.expert_ranks != 0) {
    throw std::invalid_argument("expert parallel size is " + with_commas(problem.expert_ranks) +
                                "; expected a divisor of the " + with_commas(problem.num_ranks) +
                                " ranks");
  }
}

// Whether the ranks hold the sequence, whole or as a stream.
bool holds(const Problem& problem, int64_t length) {
  const int64_t degree = least_degree(problem, length);
  if (degree >= 1 && degree <= problem.num_ranks) return true;
  return problem.streams && least_stream_degree(problem, length) > 0;
}

// What to add to an error message where offload or streams would help; nothing where they would not.
std::string remedies(const Problem& problem, int64_t length) {
  Problem other = problem;
  other.host_memory_bytes = kInfinity;
  if (problem.offload && holds(other, length)) return ", or raise host_memory_bytes";
  other.host_memory_bytes = problem.host_memory_bytes;
  other.offload = true;
  const int64_t degree = least_degree(other, length);
  const bool fits = degree >= 1 && degree <= problem.num_ranks;
  std::string found;
  if (!problem.offload && fits) {
    found = ", or use offload=\"auto\", which needs " + with_commas(degree);
  }
  other.offload = problem.offload;
  other.recompute = true;
  const int64_t recomputed =
      problem.recompute || problem.expert_ranks > 1 ? 0 : least_recomputed_degree(other, length);
  if (recomputed > 0) found += ", or recompute=\"auto\", which needs " + with_commas(recomputed);
  other.recompute = problem.recompute;
  other.offload = true;
  other.streams = true;
  if (least_stream_degree(other, length) == 0) return found;
  if (problem.streams) return ", or use offload=\"auto\": what its stream keeps waits on the host";
  other.offload = problem.offload;
  const bool is_enough = least_stream_degree(other, length) > 0;
  return found + ", or use streams=True with the strategy auto" +
         (is_enough ? "" : " and offload=\"auto\"");
}

void check_length(const Problem& problem, std::size_t id) {
  const int64_t length = problem.lengths[id];
  const bool in_range = length >= 1 && length <= std::min(problem.max_length, kMostTokens);
  const int64_t degree = in_range ? least_degree(problem, length) : 0;
  if (degree >= 1 && degree <= problem.num_ranks) return;
  if (in_range && problem.streams && least_stream_degree(problem, length) > 0) return;
  if (in_range && problem.recompute && least_recomputed_degree(problem, length) > 0) return;
  const std::string name = "sequence " + std::to_string(id) + " of the batch";
  if (length < 1 || length > kMostTokens) check_range("length of " + name, length, kMostTokens);
  if (length > problem.max_length) {
    throw std::invalid_argument(name + " has " + with_commas(length) +
                                " tokens, more than the context length " +
                                with_commas(problem.max_length) + ": raise max_length or cut it");
  }
  const std::string found = name + " has " + with_commas(length) + " tokens and ";
  const std::string capacity = with_commas(problem.tokens_per_rank) + " tokens ";
  const std::string remedy = remedies(problem, length);
  if (degree == 0) {
    throw std::invalid_argument(
        found + "cannot be shared at " + capacity + "a rank (a slice has at least 2 x " +
        with_commas(problem.slice_multiple) + "): raise tokens_per_rank" + remedy);
  }
  throw std::invalid_argument(found + "needs " + with_commas(degree) + " ranks at " + capacity +
                              "each; there are " + with_commas(problem.num_ranks) +
                              ": raise tokens_per_rank or add ranks" + remedy);
}

}  // namespace

void check(const Problem& problem) {
  check_range("number of ranks", problem.num_ranks, kMostRanks);
  check_range("tokens per rank", problem.tokens_per_rank, kMostTokens);
  check_range("slice multiple", problem.slice_multiple, kMostTokens);
  check_range("pipeline stages", problem.pipeline_stages, kMostStages);
  check_row_weights(problem);
  check_range("sequence parts", problem.sequence_parts, kMostParts);
  check_number("linear tokens", problem.linear_tokens, true);
  check_range("effort", problem.effort, kMostEffort);
  if (problem.host_memory_bytes != kInfinity) {
    check_number("host_memory_bytes", problem.host_memory_bytes, true);
  }
  check_expert_ranks(problem);
  check_cost_model(problem.cost);
  check_speeds(problem);
  if (problem.lengths.empty()) {
    throw std::invalid_argument("there are 0 sequences; expected at least 1");
  }
  check_range("number of sequences", static_cast<int64_t>(problem.lengths.size()), kMostSequences);
  for (std::size_t id = 0; id < problem.lengths.size(); ++id) check_length(problem, id);
  check_range("context length", problem.max_length, kMostTokens);
}

}  // namespace hdp
