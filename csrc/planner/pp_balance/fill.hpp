// pp-balance, third part: the short sequences, so many seconds of them in each slot.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/types.hpp"

namespace hdp {

using Bin = std::vector<SequenceId>;  // sequence ids of a micro-batch of one rank

constexpr std::size_t kNoPlace = index(-1);

// A place for a micro-batch of a rank's own.
struct Slot {
  double wanted_s = 0;          // at speed 1, without g
  double base_s = 0;            // of a sequence that is in it from the beginning
  std::size_t base = kNoPlace;  // that sequence, by its place among all; kNoPlace: there is none
  int64_t distance = 0;  // from the rank's longest ring: of alike slots the nearest get the most
  bool is_needed = false;
};

struct Filling {
  std::vector<std::vector<Bin>> bins;  // by rank: in the order of its slots, none empty
  std::vector<double> seconds;         // by rank, at speed 1, without g
};

// A sequence whole on one rank.
struct Whole {
  SequenceId id = 0;
  int64_t tokens = 0;  // padded
  double seconds = 0;
};

// All sequences, `order` holds their ids, longest first.
std::vector<Whole> whole_sequences(const Problem& problem, const std::vector<SequenceId>& order);

// The sequences that are put where there is room: all behind the first num_long.
class Shorts {
 public:
  Shorts(const Problem& problem, const std::vector<Whole>& all, std::size_t num_long);

  std::size_t size() const { return all_.size() - num_long_; }
  double total_s() const { return total_s_; }
  double tokens_per_s() const { return total_s_ > 0 ? tokens_ / total_s_ : 0; }

  // Of an average micro-batch that holds nearly as much as it can.
  double full_bin_s() const { return full_bin_s_; }

  // Of micro-batches that take about unit_s: at most what they hold, at least the longest of all.
  double bin_s(double unit_s) const;

  // Splits all of them into the slots of each rank, and more if they do not fit; slots that are not
  // needed may stay empty. Returns false, and no filling, if they are too few.
  bool fill(const std::vector<std::vector<Slot>>& slots, Filling& filling) const;

 private:
  class Filler;

  const Problem& problem_;
  const std::vector<Whole>& all_;
  std::size_t num_long_;
  double total_s_ = 0;
  double tokens_ = 0;  // padded
  double full_bin_s_ = 0;
};

}  // namespace hdp
