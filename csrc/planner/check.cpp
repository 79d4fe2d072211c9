#include "planner/check.hpp"

#include <cmath>
#include <stdexcept>
#include <string>

#include "planner/slices.hpp"

namespace hdp {
namespace {

constexpr int64_t kMostTokens = int64_t{1} << 40;
constexpr int64_t kMostRanks = int64_t{1} << 20;

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

void check_number(const std::string& name, double value, bool zero_allowed) {
  if (std::isfinite(value) && (value > 0 || (zero_allowed && value == 0))) return;
  throw std::invalid_argument("cost model: " + name + " is " + std::to_string(value) +
                              "; expected a finite number " + (zero_allowed ? ">= 0" : "> 0"));
}

void check_cost_model(const CostModel& cost) {
  check_number("a", cost.a, true);
  check_number("b", cost.b, true);
  check_number("g", cost.g, true);
  check_number("kv_bytes_per_token", cost.kv_bytes_per_token, true);
  check_number("intra_node_bytes_per_s", cost.intra_node_bytes_per_s, false);
  check_number("inter_node_bytes_per_s", cost.inter_node_bytes_per_s, false);
  check_range("ranks_per_node", cost.ranks_per_node, kMostRanks);
}

void check_length(const Problem& problem, std::size_t id) {
  const int64_t length = problem.lengths[id];
  const std::string name = "sequence " + std::to_string(id) + " of the batch";
  if (length < 1 || length > kMostTokens) check_range("length of " + name, length, kMostTokens);
  if (length > problem.max_length) {
    throw std::invalid_argument(name + " has " + with_commas(length) +
                                " tokens, more than the context length " +
                                with_commas(problem.max_length) + ": raise max_length or cut it");
  }
  const int64_t degree = least_degree(length, problem.tokens_per_rank, problem.slice_multiple);
  if (degree == 0) {
    throw std::invalid_argument(
        name + " has " + with_commas(length) + " tokens and cannot be shared at " +
        with_commas(problem.tokens_per_rank) + " tokens a rank (a slice has at least 2 x " +
        with_commas(problem.slice_multiple) + "): raise --hdp-tokens-per-rank");
  }
  if (degree > problem.num_ranks) {
    throw std::invalid_argument(
        name + " has " + with_commas(length) + " tokens and needs " + with_commas(degree) +
        " ranks at " + with_commas(problem.tokens_per_rank) + " tokens each; there are " +
        with_commas(problem.num_ranks) + ": raise --hdp-tokens-per-rank or add ranks");
  }
}

}  // namespace

void check(const Problem& problem) {
  check_range("number of ranks", problem.num_ranks, kMostRanks);
  check_range("tokens per rank", problem.tokens_per_rank, kMostTokens);
  check_range("slice multiple", problem.slice_multiple, kMostTokens);
  check_cost_model(problem.cost);
  if (problem.lengths.empty()) {
    throw std::invalid_argument("there are 0 sequences; expected at least 1");
  }
  for (std::size_t id = 0; id < problem.lengths.size(); ++id) check_length(problem, id);
  check_range("context length", problem.max_length, kMostTokens);
}

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

}  // namespace hdp
