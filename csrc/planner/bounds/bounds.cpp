#include "planner/bounds/bounds.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <numeric>

#include "planner/base/cost_model.hpp"
#include "planner/base/memory.hpp"
#include "planner/base/slices.hpp"
#include "planner/base/stream.hpp"

namespace hdp {
namespace {

// The most that whole sequences of `tokens` > 0 tokens together can take on one rank.
double most_compute_s(const CostModel& cost, int64_t tokens) {
  if (cost.attention.rises_per_token()) return compute_s(cost, tokens);
  return static_cast<double>(tokens) *
         (cost.attention.most_per_token(tokens) + cost.linear_s_per_token);
}

class Bound {
 public:
  explicit Bound(const Problem& problem)
      : problem_(problem), cost_(problem.cost), speeds_(problem.speeds) {
    // a ring of so few ranks may leave its node, where that is faster
    cost_.intra_node_bytes_per_s =
        std::max(cost_.intra_node_bytes_per_s, cost_.inter_node_bytes_per_s);
    cost_.intra_node_hop_all_layers_s =
        std::min(cost_.intra_node_hop_all_layers_s, cost_.inter_node_hop_all_layers_s);
    if (speeds_.empty()) speeds_.assign(index(problem.num_ranks), 1.0);
    if (!problem.speeds.empty()) std::sort(speeds_.begin(), speeds_.end(), std::greater<>());
  }

  // The least own time of a sequence at `least` ranks or more, on the fastest ones.
  double own_s(int64_t length, int64_t least) const {
    double own = kInfinity;
    for (int64_t degree = least; degree <= problem_.num_ranks; ++degree) {
      const double speed = speeds_[index(degree - 1)];
      own = std::min(own, own_at(length, degree, speed));
    }
    return own;
  }

  // The least e(s, D) of a sequence over the degrees that serve a plan of `makespan_s`, as if all
  // ranks were fast in computing and slow in waiting.
  double exposed_s(int64_t length, int64_t least, double makespan_s) const;

  // Seconds x speed that the fast members of a ring of at least `least` ranks lose to slow ones.
  double waited_s(int64_t length, int64_t least) const;

 private:
  double own_at(int64_t length, int64_t degree, double speed) const {
    const double fixed = fixed_s(cost_, degree);
    const Links links = best_links(cost_, degree);
    const double whole = ring_s(cost_, length, degree, links, speed) + fixed / speed;
    if (!may_compute_twice(problem_)) return whole;
    const auto tokens = static_cast<double>(length);
    const double shared = attention_s(cost_, length) / static_cast<double>(degree);
    const double computed = compute_s(cost_, length) / static_cast<double>(degree) + fixed +
                            merge_s(cost_, degree, tokens) -
                            spared_s(cost_, degree, tokens, shared, links);
    return std::min(whole, kComputedTwice * computed / speed);
  }

  // The least e(s, D) from a degree on: D - 1 times q - attention / D, which is convex in D.
  double exposed_from(int64_t length, int64_t degree) const {
    const double bandwidth = best_links(cost_, degree).bytes_per_s;
    const double q =
        speeds_.back() * 3 * static_cast<double>(length) * cost_.kv_bytes_per_token / bandwidth;
    const double attention = attention_s(cost_, length);
    if (q == 0) return -attention;
    const double d = std::max(static_cast<double>(degree), std::sqrt(attention / q));
    return (d - 1) * (q - attention / d);
  }

  int64_t least_degree_across(int64_t length, int64_t least, double makespan_s) const;

  const Problem& problem_;
  CostModel cost_;
  std::vector<double> speeds_;  // the fastest first
};

// A degree above a node's below which none serves a plan of `makespan_s`; 0 if none does at all.
int64_t Bound::least_degree_across(int64_t length, int64_t least, double makespan_s) const {
  const double speed = speeds_.front();
  const auto s = static_cast<double>(length);
  const double room = makespan_s - fixed_s(cost_, cost_.ranks_per_node + 1) / speed;
  if (!(room > 0)) return 0;
  const auto at_least = [&](double wanted) {
    // rounding may not make the bound too high
    const double degree = std::max({std::ceil(wanted * (1 - 1e-9)), static_cast<double>(least),
                                    static_cast<double>(cost_.ranks_per_node + 1)});
    return degree <= static_cast<double>(problem_.num_ranks) ? static_cast<int64_t>(degree) : 0;
  };
  const double limit_s = makespan_s * (1 + 1e-9);
  int64_t degree = at_least(compute_s(cost_, length) / speed / room);
  if (degree == 0 || own_at(length, degree, speed) <= limit_s) return degree;
  // exposed there: b s / (D v) + X (D - 1) / D <= room  <=>  (b s / v - X) / D <= room - X
  const Links links = best_links(cost_, cost_.ranks_per_node + 1);
  const double all = 3 * s * cost_.kv_bytes_per_token / links.bytes_per_s;
  if (room > all) {
    const int64_t exposed = at_least((cost_.linear_s_per_token * s / speed - all) / (room - all));
    if (exposed == 0) return 0;
    degree = std::max(degree, exposed);
  }
  constexpr int kMostSteps = 16;  // where they end none below serves
  for (int i = 0; i < kMostSteps && own_at(length, degree, speed) > limit_s; ++i) {
    if (++degree > problem_.num_ranks) return 0;
  }
  return degree;
}

double Bound::exposed_s(int64_t length, int64_t least, double makespan_s) const {
  const int64_t in_a_node = std::min(cost_.ranks_per_node, problem_.num_ranks);
  for (int64_t degree = least; degree <= in_a_node; ++degree) {
    if (own_at(length, degree, speeds_.front()) > makespan_s * (1 + 1e-9)) continue;
    // a ring across nodes has at least as many ranks and less bandwidth
    return exposed_from(length, degree);
  }
  const int64_t across = least_degree_across(length, least, makespan_s);
  return across > 0 ? exposed_from(length, across) : kInfinity;
}

double Bound::waited_s(int64_t length, int64_t least) const {
  constexpr int64_t kMostDegrees = 64;  // more: the bound does without this part
  const int64_t num_ranks = problem_.num_ranks;
  if (speeds_.front() == speeds_.back() || num_ranks - least > kMostDegrees) return 0;
  if (problem_.offload) return 0;  // it makes room for more than `fillable`
  const double compute = compute_s(cost_, length);
  double lost = kInfinity;
  for (int64_t degree = least; degree <= num_ranks; ++degree) {
    const auto d = static_cast<double>(degree);
    const int64_t room =
        problem_.tokens_per_rank - slice_tokens(length, degree, problem_.slice_multiple);
    const double fillable = room > 0 ? d * most_compute_s(cost_, room) : 0;
    // of all rings with the same slowest member, neighbours in the order of speeds lose least
    for (int64_t last = degree - 1; last < num_ranks; ++last) {
      const auto end = speeds_.begin() + last + 1;
      const double slowest = speeds_[index(last)];
      const double sum = std::accumulate(end - degree, end, 0.0);
      lost = std::min(lost, (sum - d * slowest) * compute / (d * slowest) - fillable);
      if (lost <= 0) return 0;
    }
  }
  return lost;
}

// The longest sequence that fits on one rank without offload.
int64_t whole_tokens(const Problem& problem) {
  return problem.tokens_per_rank / problem.slice_multiple * problem.slice_multiple;
}

// The least degree of a sequence, which may be any if it streams or is recomputed.
int64_t fewest_ranks(const Problem& problem, int64_t length) {
  return may_compute_twice(problem) ? 1 : least_degree(problem, length);
}

// Compute that a sequence has twice because no ring holds it otherwise.
double computed_again_s(const Problem& problem, int64_t length) {
  if (!may_compute_twice(problem) || length <= whole_tokens(problem)) return 0;
  const int64_t degree = least_degree(problem, length);
  const bool fits = degree >= 1 && degree <= problem.num_ranks;
  return fits ? 0 : (kComputedTwice - 1) * compute_s(problem.cost, length);
}

// g, and as many blocks as a sequence needs ranks, for every C tokens, of which with offload, or
// recomputed, a rank may hold more; and merging, of which all members of a ring together have
// (D - 1) merge_b s.
double least_fixed_s(const Problem& problem) {
  const CostModel& cost = problem.cost;
  const int64_t whole = whole_tokens(problem);
  double tokens = 0;
  double blocks = 0;
  for (const int64_t length : problem.lengths) {
    tokens += static_cast<double>(length);
    if (problem.cost.block_all_layers_s == 0 && problem.cost.merge_b == 0) continue;
    const int64_t least = length <= whole ? 1 : fewest_ranks(problem, length);
    blocks += static_cast<double>(length) * static_cast<double>(least);
  }
  const double held = std::min(problem.offload ? resident_share(problem, 1) : 1,
                               problem.recompute ? recomputed_share(problem.cost) : 1);
  const double capacity = static_cast<double>(problem.tokens_per_rank) / held;
  const double merged = std::max(0.0, blocks - tokens);
  return (problem.cost.g * tokens + problem.cost.block_all_layers_s * blocks) / capacity +
         (cost.merge_b - (cost.made_bytes_per_token > 0 ? cost.projection_b : 0)) * merged;
}

struct Long {
  int64_t length = 0;
  int64_t least = 1;
  // Attention of the batch's other sequences that take more a token: what they can hide.
  double hidden_by_others_s = 0;
};

// The sequences that memory shares out and those that outlast a makespan alone, longest first.
std::vector<Long> long_sequences(const Problem& problem, double makespan_s) {
  const int64_t whole = whole_tokens(problem);
  const int64_t shorter = std::min(whole, length_within(problem.cost, makespan_s));
  std::vector<int64_t> lengths;
  std::copy_if(problem.lengths.begin(), problem.lengths.end(), std::back_inserter(lengths),
               [&](int64_t length) { return length > shorter; });
  std::sort(lengths.begin(), lengths.end(), std::greater<>());
  std::vector<Long> longs;
  for (const int64_t length : lengths) {
    // rounding may have made `shorter` a little too short
    if (length <= whole && compute_s(problem.cost, length) <= makespan_s) break;
    longs.push_back({length, fewest_ranks(problem, length)});
  }
  return longs;
}

// Puts those with the most attention per token first, which with a s^2 the longest ones are.
void order_by_attention(const Problem& problem, std::vector<Long>& longs) {
  constexpr double kRounding = 1e-12;  // of what is the same per token
  if (longs.empty() || problem.cost.attention.rises_per_token()) return;
  const auto per_token_s = [&](const Long& one) {
    return attention_per_token_s(problem.cost, one.length);
  };
  std::stable_sort(longs.begin(), longs.end(), [&](const Long& left, const Long& right) {
    return per_token_s(left) > per_token_s(right);
  });
  int64_t shortest = longs.front().length;
  for (const Long& one : longs) shortest = std::min(shortest, one.length);
  for (const int64_t length : problem.lengths) {
    if (length >= shortest) continue;  // one of them
    const double most_s = attention_per_token_s(problem.cost, length) * (1 - kRounding);
    const auto first = std::partition_point(
        longs.begin(), longs.end(), [&](const Long& one) { return per_token_s(one) >= most_s; });
    if (first != longs.end()) first->hidden_by_others_s += attention_s(problem.cost, length);
  }
  double sum = 0;
  for (Long& one : longs) sum = one.hidden_by_others_s += sum;
}

double exposed_s(const Bound& bound, const std::vector<Long>& longs, double makespan_s) {
  double sum = 0;
  double most = 0;
  for (const Long& one : longs) {
    sum += bound.exposed_s(one.length, one.least, makespan_s);
    most = std::max(most, sum - one.hidden_by_others_s);
  }
  return most;
}

}  // namespace

double lower_bound_s(const Problem& problem) {
  const int64_t longest = *std::max_element(problem.lengths.begin(), problem.lengths.end());
  return std::max(total_compute_s(problem) / total_speed(problem),
                  Bound(problem).own_s(longest, 1));
}

double least_own_s(const Problem& problem, int64_t length) {
  return Bound(problem).own_s(length, fewest_ranks(problem, length));
}

double tight_bound_s(const Problem& problem) {
  constexpr int kSteps = 40;
  const Bound bound(problem);
  double low = lower_bound_s(problem);
  std::vector<Long> longs = long_sequences(problem, low);
  double work = total_compute_s(problem) + least_fixed_s(problem);
  for (const Long& one : longs) {
    work += may_compute_twice(problem) ? computed_again_s(problem, one.length)
                                       : bound.waited_s(one.length, one.least);
  }
  if (!longs.empty()) low = std::max(low, bound.own_s(longs.front().length, longs.front().least));
  order_by_attention(problem, longs);
  const double speed = total_speed(problem);
  low = std::max(low, work / speed);
  if (may_compute_twice(problem)) return low;
  const auto fits = [&](double makespan_s) {
    return work + exposed_s(bound, longs, makespan_s) <= makespan_s * speed * (1 + 1e-9);
  };
  if (fits(low)) return low;
  double high = 2 * low;
  for (int i = 0; i < kSteps && !fits(high); ++i) high *= 2;
  for (int i = 0; i < kSteps && high > low * (1 + 1e-7); ++i) {
    const double middle = (low + high) / 2;
    (fits(middle) ? high : low) = middle;
  }
  return low;
}

}  // namespace hdp
