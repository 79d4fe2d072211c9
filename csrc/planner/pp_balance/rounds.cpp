#include "planner/pp_balance/rounds.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "planner/base/cost_model.hpp"
#include "planner/base/memory.hpp"
#include "planner/base/slices.hpp"
#include "planner/base/stream.hpp"
#include "planner/schedule/ways.hpp"
#include "planner/rings/rings.hpp"

namespace hdp {
namespace {

// Compute, blocks and merging of each of so many ranks.
double busy_s(const CostModel& cost, const LongSequence& sequence, int64_t degree) {
  const auto d = static_cast<double>(degree);
  return sequence.compute_s / d + d * cost.block_all_layers_s +
         merge_s(cost, degree, static_cast<double>(sequence.length));
}

// The degree that brings that time down to seconds, if one that the sequence may have does; else
// the greatest of these.
int64_t degree_within(const CostModel& cost, const LongSequence& sequence, double seconds) {
  const double wanted = std::ceil(parts_within(cost, sequence.length, sequence.compute_s, seconds));
  // the negated form sends the NaN of a cost model without times to the memory minimum
  if (!(wanted > static_cast<double>(sequence.least))) return sequence.least;
  if (wanted >= static_cast<double>(sequence.greatest)) return sequence.greatest;
  return static_cast<int64_t>(wanted);
}

// Beyond it a wider ring takes more blocks and merging than it saves compute.
int64_t fastest_degree(const Problem& problem, int64_t length, double compute_s) {
  const double merging = problem.cost.merge_b * static_cast<double>(length);
  if (merging > 0 && compute_s <= merging) return 1;
  const double parts = std::sqrt((compute_s - merging) / problem.cost.block_all_layers_s);
  // the negated form sends the NaN of a cost model without times to all ranks
  if (!(parts < static_cast<double>(problem.num_ranks))) return problem.num_ranks;
  return std::max<int64_t>(1, static_cast<int64_t>(parts));
}

int64_t total_degree(const CostModel& cost, const std::vector<const LongSequence*>& chosen,
                     double seconds) {
  int64_t total = 0;
  for (const LongSequence* sequence : chosen) total += degree_within(cost, *sequence, seconds);
  return total;
}

// The least common time whose degrees still fit side by side on `width` ranks.
double least_level_s(const CostModel& cost, const std::vector<const LongSequence*>& chosen,
                     int64_t width) {
  constexpr int kSteps = 30;
  constexpr int kRoundings = 4;
  double high = 0;
  for (const LongSequence* sequence : chosen) {
    high = std::max(high, busy_s(cost, *sequence, sequence->least));
  }
  // a quotient that is rounded up asks for one rank more than the least, where those just fit
  for (int i = 0; i < kRoundings && total_degree(cost, chosen, high) > width; ++i) {
    high = std::nextafter(high, kInfinity);
  }
  while (width_costs(cost) && total_degree(cost, chosen, high) > width) high *= 2;
  double low = 0;
  for (int i = 0; i < kSteps; ++i) {
    const double middle = (low + high) / 2;
    (total_degree(cost, chosen, middle) <= width ? high : low) = middle;
  }
  return high;
}

Shared share(const Problem& problem, const LongSequence& sequence, int64_t degree) {
  const Links links = likely_links(problem.cost, degree);
  const double seconds = sequence_s(problem, sequence.length, degree, links);
  return {sequence.id, sequence.place, degree, seconds};
}

// Rounds do without offload, recomputation and streams, except for a sequence that does not fit
// otherwise: on all ranks.
int64_t least_degree_in_rounds(const Problem& problem, SequenceId id) {
  const int64_t length = problem.lengths[index(id)];
  const int64_t least = least_degree(length, problem.tokens_per_rank, problem.slice_multiple);
  if (least > 0 && least <= problem.num_ranks) return least;
  if (offload_ratio(problem, length, problem.num_ranks)) return problem.num_ranks;
  if (recomputes(problem, length, problem.num_ranks)) return problem.num_ranks;
  if (may_stream(problem, length, problem.num_ranks)) return problem.num_ranks;
  throw std::invalid_argument(
      "pp-balance: sequence " + std::to_string(id) + " of the batch has " + std::to_string(length) +
      " tokens, which fit on some numbers of the " + std::to_string(problem.num_ranks) +
      " ranks with offload, but not on all: raise tokens_per_rank");
}

}  // namespace

std::vector<LongSequence> long_sequences(const Problem& problem,
                                         const std::vector<SequenceId>& order, double most_s) {
  std::vector<LongSequence> result;
  int64_t greatest = problem.num_ranks;  // a shorter sequence may not be wider
  for (const SequenceId id : order) {
    const int64_t length = problem.lengths[index(id)];
    const int64_t least = least_degree_in_rounds(problem, id);
    const double seconds = compute_s(problem.cost, length);
    if (!is_ring(problem, length, least) && !(seconds > most_s)) break;
    const int64_t useful = std::min(greatest_hidden_degree(problem.cost, length, problem.num_ranks),
                                    length / (2 * problem.slice_multiple));
    const int64_t fastest = fastest_degree(problem, length, seconds);
    greatest = std::max(least, std::min({greatest, useful, fastest}));
    result.push_back({id, result.size(), length, seconds, least, greatest});
  }
  return result;
}

RoundMaker::RoundMaker(const Problem& problem, const std::vector<LongSequence>& sequences)
    : problem_(problem), sequences_(sequences), left_(PlaceSet::all(sequences.size())) {}

// The first index from i on whose degree is at most room: degrees fall with the length.
std::size_t RoundMaker::first_within(std::size_t i, int64_t room, double level_s) const {
  const auto found =
      std::partition_point(at(sequences_, i), sequences_.end(), [&](const LongSequence& sequence) {
        return degree_within(problem_.cost, sequence, level_s) > room;
      });
  return index(found - sequences_.begin());
}

std::vector<const LongSequence*> RoundMaker::choose(int64_t width, double level_s) {
  std::vector<const LongSequence*> chosen;
  int64_t degree = std::min(width, degree_within(problem_.cost, longest(), level_s));
  const double level = std::max(level_s, busy_s(problem_.cost, longest(), degree));
  int64_t room = width;
  for (std::size_t i = left_.next(0); i < sequences_.size();
       i = left_.next(first_within(i, room, level))) {
    if (!chosen.empty()) degree = degree_within(problem_.cost, sequences_[i], level);
    room -= degree;
    chosen.push_back(&sequences_[i]);
    left_.erase(i);
  }
  return chosen;
}

Round RoundMaker::take(int64_t width, double level_s) {
  const std::vector<const LongSequence*> chosen = choose(width, level_s);
  const double level = least_level_s(problem_.cost, chosen, width);
  Round round;
  for (const LongSequence* sequence : chosen) {
    round.push_back(share(problem_, *sequence, degree_within(problem_.cost, *sequence, level)));
  }
  std::stable_sort(round.begin(), round.end(), [](const Shared& left, const Shared& right) {
    return left.seconds > right.seconds;
  });
  return round;
}

std::vector<Round> whole_rounds(const Problem& problem,
                                const std::vector<LongSequence>& sequences) {
  std::vector<Round> rounds;
  for (const LongSequence& sequence : sequences) {
    rounds.push_back({share(problem, sequence, problem.num_ranks)});
  }
  return rounds;
}

}  // namespace hdp
