#include "planner/rings/columns.hpp"

#include <algorithm>
#include <cmath>

#include "planner/base/cost_model.hpp"
#include "planner/rings/degrees.hpp"

namespace hdp {
namespace {

// The least degree at which the sequence takes at most `seconds`; 0 if traffic would be exposed.
int64_t filling_degree(const Batch& batch, std::size_t place, double seconds) {
  const Problem& problem = batch.problem;
  const double room_s = seconds - problem.cost.g;
  if (!(room_s > 0)) return 0;
  const double parts =
      std::ceil(parts_within(problem.cost, batch.length(place), batch.compute_s(place), room_s));
  if (parts > static_cast<double>(batch.hidden[place])) return 0;
  const int64_t degree = std::max<int64_t>(batch.least[place], static_cast<int64_t>(parts));
  return may_share(problem, batch.length(place), batch.least[place], degree) ? degree : 0;
}

}  // namespace

Column best_column(const Batch& batch, const FreeRanks& free, std::size_t place, double until_s) {
  const Problem& problem = batch.problem;
  Column best;
  double least_left_s = 0;
  for (std::size_t group = 0; group < free.groups().size(); ++group) {
    const auto& [clock, ranks] = free.groups()[group];
    const int64_t degree = filling_degree(batch, place, until_s - clock);
    if (degree == 0 || degree > static_cast<int64_t>(ranks.size())) continue;
    const double blocks_s = static_cast<double>(degree) * problem.cost.block_all_layers_s;
    const double left_s =
        until_s - clock - blocks_s - batch.compute_s(place) / static_cast<double>(degree) -
        merge_s(problem.cost, degree, static_cast<double>(batch.length(place)));
    if (best.degree > 0 && left_s >= least_left_s) continue;
    best = {group, degree};
    least_left_s = left_s;
  }
  return best;
}

}  // namespace hdp
