// pp-balance, first part: the sequences that need several ranks, in rounds of alike times.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/place_set.hpp"
#include "planner/base/types.hpp"

namespace hdp {

// A sequence that gets a micro-batch of its own, and the degrees it may have.
struct LongSequence {
  SequenceId id = 0;
  std::size_t place = 0;  // among all, longest first
  int64_t length = 0;
  double compute_s = 0;
  int64_t least = 0;  // by memory
  // Beyond it traffic is exposed, chunks are too short or blocks cost more than they save; at least
  // `least`.
  int64_t greatest = 0;
};

struct Shared {
  SequenceId sequence = 0;
  std::size_t place = 0;  // of the sequence
  int64_t degree = 0;
  double seconds = 0;
};

// Rings that run side by side, on at most all ranks; the longest time first.
using Round = std::vector<Shared>;

// Those that do not fit on one rank or would take longer there than most_s; longest first. `order`
// holds all sequence ids, longest first.
std::vector<LongSequence> long_sequences(const Problem& problem,
                                         const std::vector<SequenceId>& order, double most_s);

// Deals the sequences into rounds.
class RoundMaker {
 public:
  RoundMaker(const Problem& problem, const std::vector<LongSequence>& sequences);

  bool empty() const { return left_.next(0) == sequences_.size(); }
  const LongSequence& longest() const { return sequences_[left_.next(0)]; }

  // The next round, on `width` ranks, of which the longest sequence must not need more. It starts
  // with that one, at the degree that brings its time to level_s if a degree does, and goes on with
  // the longest ones that still fit at its time; then the degrees rise together until the ranks are
  // used up or traffic would be exposed.
  Round take(int64_t width, double level_s);

 private:
  std::vector<const LongSequence*> choose(int64_t width, double level_s);
  std::size_t first_within(std::size_t i, int64_t room, double level_s) const;

  const Problem& problem_;
  const std::vector<LongSequence>& sequences_;
  PlaceSet left_;
};

// Every sequence on all ranks, one after the other: leaves no gaps.
std::vector<Round> whole_rounds(const Problem& problem, const std::vector<LongSequence>& sequences);

}  // namespace hdp
