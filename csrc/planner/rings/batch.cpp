#include "planner/rings/batch.hpp"

#include <algorithm>
#include <utility>

#include "planner/base/cost_model.hpp"
#include "planner/base/memory.hpp"
#include "planner/base/slices.hpp"
#include "planner/base/stream.hpp"
#include "planner/bounds/bounds.hpp"

namespace hdp {

namespace {

// A sequence that takes less than this share of a rank's time is sand: it fills any hole.
constexpr double kSand = 1.0 / 32;

// A sequence whose own time is within this of what it should be is short enough.
constexpr double kOwnTime = 1.002;

// The least degree of a ring, N + 1 if none of N ranks or fewer holds the sequence; and that at
// which it is computed twice, recomputed or as a stream, if there is one and `twice` asks for it or
// no ring serves, else again that of a ring.
std::pair<int64_t, int64_t> least_degrees(const Problem& problem, int64_t length, bool twice) {
  int64_t whole = least_degree(problem, length);
  if (whole == 0) whole = problem.num_ranks + 1;
  const bool is_forced = whole > problem.num_ranks;
  if (!may_compute_twice(problem) || whole == 1 || !(twice || is_forced)) return {whole, whole};
  int64_t least = std::min(whole, problem.num_ranks + 1);
  for (const int64_t degree : {problem.streams ? least_stream_degree(problem, length) : 0,
                               problem.recompute ? least_recomputed_degree(problem, length) : 0}) {
    if (degree > 0) least = std::min(least, degree);
  }
  return {std::min(whole, problem.num_ranks + 1), least};
}

// The least degree from `hidden` on at which the sequence is short enough; `hidden` if it never is.
int64_t short_enough_degree(const Problem& problem, int64_t length, int64_t hidden, double time_s) {
  const CostModel& cost = problem.cost;
  for (int64_t degree = hidden; degree <= problem.num_ranks; ++degree) {
    const double own_s =
        ring_s(cost, length, degree, likely_links(cost, degree)) + fixed_s(cost, degree);
    if (own_s <= kOwnTime * time_s) return degree;
  }
  return hidden;
}

}  // namespace

Batch::Batch(const Problem& given, bool twice)
    : problem(given),
      order(longest_first(given.lengths)),
      lengths(given.lengths, order),
      total_speed(hdp::total_speed(given)),
      ramp(static_cast<double>(given.pipeline_stages - 1)),
      full_s(hdp::compute_s(given.cost, given.tokens_per_rank) + fixed_s(given.cost, 1)) {
  for (std::size_t place = 0; place < order.size(); ++place) total_s += compute_s(place);
  share_s = total_s / total_speed;
  if (ramp == 0) {
    bound_s = own_time_s = tight_bound_s(problem);
  } else {
    const double own_s = least_own_s(problem, length(0));
    bound_s = std::max(share_s, (1 + ramp) * own_s);
    own_time_s = std::max(own_s, (share_s + ramp * full_s) / (1 + ramp));
  }
  double small_tokens = 0;
  for (std::size_t place = 0; place < order.size(); ++place) {
    const bool fits =
        slice_tokens(length(place), 1, problem.slice_multiple) <= problem.tokens_per_rank;
    if (fits && compute_s(place) <= kSand * share_s) break;
    const auto [whole, any] = least_degrees(problem, length(place), twice);
    least_whole.push_back(static_cast<int32_t>(whole));
    least.push_back(static_cast<int32_t>(any));
  }
  num_big = least.size();
  least.shrink_to_fit();
  least_whole.shrink_to_fit();
  hidden.reserve(num_big);
  short_enough.reserve(num_big);
  for (std::size_t place = 0; place < num_big; ++place) {
    const int64_t degree = greatest_hidden_degree(problem.cost, length(place), problem.num_ranks);
    hidden.push_back(static_cast<int32_t>(degree));
    short_enough.push_back(static_cast<int32_t>(
        short_enough_degree(problem, length(place), degree, own_time_s)));
  }
  for (std::size_t place = num_big; place < order.size(); ++place) {
    small_s += compute_s(place);
    small_tokens += static_cast<double>(length(place));
  }
  small_s += fixed_s(problem.cost, 1) * small_tokens / static_cast<double>(problem.tokens_per_rank);
}

}  // namespace hdp
