#include "planner/rings/degrees.hpp"

#include <algorithm>
#include <cmath>

#include "planner/base/cost_model.hpp"
#include "planner/base/memory.hpp"
#include "planner/base/stream.hpp"

namespace hdp {
namespace {

// With pipeline stages a long micro-batch costs more than the traffic that a slightly wider ring
// exposes.
constexpr double kWider = 1.1;

// Calls `visit` with the degrees of the nesting from `low` on, the greatest first, until it returns
// true.
template <typename Visit>
void any_nested(const Nesting& nesting, int64_t low, const Visit& visit) {
  for (int64_t block = nesting.num_ranks; block >= std::max<int64_t>(low, 1); block /= 2) {
    if (visit(block)) return;
    const int64_t less = block * 3 / 4;
    if (nesting.three_quarters && block > 2 && less >= low && visit(less)) return;
  }
}

// Of the degrees in [least, useful] one that nests and has the sequence take about
// compute / wanted; else `wanted` itself.
int64_t convenient_degree(const Batch& batch, const Nesting& nesting, std::size_t place,
                          int64_t wanted, int64_t useful) {
  const int64_t above = least_nested(nesting, wanted, useful);
  if (above > 0) return above;
  const int64_t below = greatest_nested(nesting, (wanted + 1) / 2, wanted - 1);
  const bool fits = below > 1 && below >= batch.least[place] &&
                    batch.compute_s(place) <= static_cast<double>(below) * batch.share_s;
  return fits ? below : wanted;
}

int64_t balanced_degree(const Batch& batch, const Nesting& nesting, std::size_t place,
                        double longest_s) {
  const Problem& problem = batch.problem;
  const int64_t length = batch.length(place);
  const int64_t least = batch.least[place];
  const int64_t hidden = batch.hidden[place];
  const int64_t exposed = batch.short_enough[place];
  const double wider = batch.ramp > 0 ? kWider * static_cast<double>(exposed) : 0;
  const int64_t useful = std::min({std::max(exposed, static_cast<int64_t>(wider)),
                                   problem.num_ranks, length / (2 * problem.slice_multiple)});
  if (useful <= least) return least;
  double computed_s = batch.compute_s(place);
  if (least < batch.least_whole[place]) computed_s *= kComputedTwice;
  const double parts = std::ceil(parts_within(problem.cost, length, computed_s, longest_s));
  // the negated form sends the NaN of a cost model without times to the memory minimum
  const bool few = !(parts > static_cast<double>(least));
  const bool many = parts >= static_cast<double>(useful) || exposed > hidden;
  const int64_t wanted = few && exposed == hidden ? least
                         : many                   ? useful
                                                  : static_cast<int64_t>(parts);
  if (wanted == 1) return 1;
  const int64_t degree = convenient_degree(batch, nesting, place, wanted, useful);
  return may_share(problem, length, least, degree) ? degree : least;
}

// Appends the balanced degrees of the places that have none yet; equal lengths have equal ones.
void append_balanced(const Batch& batch, const Nesting& nesting, double longest_s,
                     Degrees& degrees) {
  int64_t length = 0;
  for (std::size_t place = degrees.size(); place < batch.num_big; ++place) {
    const bool again = batch.length(place) == length;
    length = batch.length(place);
    degrees.push_back(
        again ? degrees.back()
              : static_cast<int32_t>(balanced_degree(batch, nesting, place, longest_s)));
  }
}

// The greatest degree that nests and hides the traffic; 0 if there is none.
int64_t widest_nested(const Batch& batch, const Nesting& nesting, std::size_t place) {
  const Problem& problem = batch.problem;
  const int64_t length = batch.length(place);
  const int64_t degree = greatest_nested(nesting, batch.least[place], batch.hidden[place]);
  return may_share(problem, length, batch.least[place], degree) ? degree : 0;
}

}  // namespace

bool may_share(const Problem& problem, int64_t length, int64_t least, int64_t degree) {
  if (degree <= least) return degree == least;
  return degree <= problem.num_ranks && degree <= length / (2 * problem.slice_multiple) &&
         (offload_ratio(problem, length, degree) || recomputes(problem, length, degree) ||
          may_stream(problem, length, degree));
}

Degrees balanced_degrees(const Batch& batch, const Nesting& nesting, double longest_s) {
  Degrees degrees;
  degrees.reserve(batch.num_big);
  append_balanced(batch, nesting, longest_s, degrees);
  return degrees;
}

Degrees layered_degrees(const Batch& batch, const Nesting& nesting, int64_t num_rows,
                        double share) {
  Degrees degrees;
  degrees.reserve(batch.num_big);
  double left_s = batch.share_s;
  for (int64_t row = 0; row < num_rows; ++row) {
    int64_t room = nesting.num_ranks;
    double longest_s = 0;
    for (std::size_t place = degrees.size(); place < batch.num_big; ++place) {
      const int64_t degree = widest_nested(batch, nesting, place);
      if (degree < 2 || degree > room) break;
      room -= degree;
      longest_s = std::max(longest_s, batch.compute_s(place) / static_cast<double>(degree));
      degrees.push_back(static_cast<int32_t>(degree));
    }
    left_s -= longest_s;
  }
  if (!(left_s > 0)) return {};
  append_balanced(batch, nesting, share * left_s, degrees);
  return degrees;
}

int64_t least_nested(const Nesting& nesting, int64_t low, int64_t high) {
  int64_t least = 0;
  any_nested(nesting, low, [&](int64_t degree) {
    if (degree <= high) least = degree;
    return false;
  });
  return least;
}

int64_t greatest_nested(const Nesting& nesting, int64_t low, int64_t high) {
  int64_t greatest = 0;
  any_nested(nesting, low, [&](int64_t degree) {
    if (degree <= high) greatest = degree;
    return greatest > 0;
  });
  return greatest;
}

}  // namespace hdp
