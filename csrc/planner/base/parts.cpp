#include "planner/base/parts.hpp"

#include <cmath>

#include "planner/base/cost_model.hpp"

namespace hdp {
namespace {

// A cut this near to a border of sequences, as a share of a part, goes to the border.
constexpr double kNear = 1.0 / 8 + 1e-9;

// A sequence, and the tokens of it that lie before.
struct Cut {
  std::size_t sequence = 0;
  double tokens = 0;
};

// Where each part but the last one ends; `ends` are the times up to the end of each sequence.
std::vector<Cut> cuts_of(const std::vector<double>& ends, int64_t num_parts, double linear_tokens) {
  const double part_s = ends.back() / static_cast<double>(num_parts);
  const double near_s = kNear * part_s;
  std::vector<Cut> cuts;
  std::size_t i = 0;
  for (int64_t number = 1; number < num_parts; ++number) {
    const double at = static_cast<double>(number) * part_s;
    while (i + 1 < ends.size() && ends[i] < at) ++i;
    const double begin = i > 0 ? ends[i - 1] : 0;
    if (at - begin <= near_s) {
      cuts.push_back({i, 0});
    } else if (ends[i] - at <= near_s) {
      cuts.push_back({i + 1, 0});
    } else {
      const double root = std::sqrt(linear_tokens * linear_tokens + 4 * (at - begin));
      cuts.push_back({i, (root - linear_tokens) / 2});
    }
  }
  return cuts;
}

}  // namespace

std::vector<PartSize> part_sizes(const std::vector<double>& lengths, int64_t num_parts,
                                 double linear_tokens) {
  std::vector<double> tokens{0};
  std::vector<double> squares{0};
  std::vector<double> ends;
  for (const double length : lengths) {
    tokens.push_back(tokens.back() + length);
    squares.push_back(squares.back() + length * length);
    ends.push_back((ends.empty() ? 0 : ends.back()) + length * (length + linear_tokens));
  }
  std::vector<PartSize> sizes;
  sizes.reserve(index(num_parts));
  Cut begin;
  const auto end_at = [&](const Cut& end) {
    const auto [i, x] = begin;
    const auto [j, y] = end;
    sizes.push_back({tokens[j] + y - (tokens[i] + x), x,
                     squares[j] + y * y - (squares[i] + x * x)});
    begin = end;
  };
  if (!ends.empty()) {
    for (const Cut& cut : cuts_of(ends, num_parts, linear_tokens)) end_at(cut);
  }
  end_at({lengths.size(), 0});
  return sizes;
}

bool queries_travel(const PartSize& size, double query_ratio) {
  const double queries = query_ratio * size.tokens;
  return queries > 0 && queries < size.tokens + size.earlier;
}

double traffic_tokens(const PartSize& size, double query_ratio) {
  return queries_travel(size, query_ratio) ? query_ratio * size.tokens : size.tokens + size.earlier;
}

double exposed_s(const CostModel& cost, int64_t degree, const std::vector<PartSize>& sizes,
                 double attention_s, Links links, double num_forwards) {
  if (sizes.size() == 1) {
    return exposed_s(cost, degree, sizes.front().tokens, attention_s, links, num_forwards);
  }
  double squares = 0;
  for (const PartSize& size : sizes) squares += size.squares;
  double seconds = 0;
  for (const PartSize& size : sizes) {
    seconds += exposed_s(cost, degree, traffic_tokens(size, cost.query_ratio),
                         attention_s * (size.squares / squares), links, num_forwards);
  }
  return seconds;
}

double fixed_s(const CostModel& cost, int64_t degree, double tokens, int64_t num_parts) {
  const auto parts = static_cast<double>(num_parts);
  double seconds = parts * fixed_s(cost, degree);
  if (num_parts > 1) {
    seconds += (parts - 1) * static_cast<double>(degree) * cost.block_all_layers_s;
    seconds += (cost.merge_b - cost.projection_b) * tokens * (1 - 1 / parts);
  }
  return seconds;
}

double made_again_s(const CostModel& cost, int64_t degree, double tokens,
                    const std::vector<PartSize>& sizes, double attention_s, Links links) {
  if (cost.projection_b == 0 || degree == 1) return 0;
  if (sizes.size() < 2) return -spared_s(cost, degree, tokens, attention_s, links);
  const auto d = static_cast<double>(degree);
  double made = 0;
  double squares = 0;
  double all = 0;
  for (const PartSize& size : sizes) {
    all += size.tokens;
    squares += size.squares;
  }
  double spared = 0;
  for (const PartSize& size : sizes) {
    if (queries_travel(size, cost.query_ratio)) {
      made += (size.tokens + size.earlier) / d;
      continue;
    }
    made += size.tokens * (d - 1) / d + size.earlier;
    spared += spared_s(cost, degree, size.tokens + size.earlier,
                       attention_s * (size.squares / squares), links);
  }
  return cost.projection_b * (made - all * (d - 1) / d) - spared;
}

double ring_s(const CostModel& cost, int64_t length, int64_t degree,
              const std::vector<PartSize>& sizes, Links links, double speed) {
  const auto num_parts = static_cast<int64_t>(sizes.size());
  const auto tokens = static_cast<double>(length);
  const double fixed = fixed_s(cost, degree, tokens, num_parts);
  if (num_parts == 1 || degree == 1) {
    return ring_s(cost, length, degree, links, speed) + fixed / speed;
  }
  const auto d = static_cast<double>(degree);
  const double attention = attention_s(cost, length) / d;
  const double made = made_again_s(cost, degree, tokens, sizes, attention, links);
  return (compute_s(cost, length) / d + merge_s(cost, degree, tokens) + fixed + made) / speed +
         exposed_s(cost, degree, sizes, attention / speed, links);
}

double recomputed_ring_s(const CostModel& cost, int64_t length, int64_t degree,
                         const std::vector<PartSize>& sizes, Links links, double speed) {
  const auto d = static_cast<double>(degree);
  const auto tokens = static_cast<double>(length);
  const double attention = attention_s(cost, length) / d;
  const double made = made_again_s(cost, degree, tokens, sizes, attention, links);
  const double computed = compute_s(cost, length) / d + merge_s(cost, degree, tokens) +
                          fixed_s(cost, degree, tokens, static_cast<int64_t>(sizes.size())) + made;
  const double exposed = exposed_s(cost, degree, sizes, attention / speed, links, 2);
  return kComputedTwice * computed / speed + exposed;
}

}  // namespace hdp
