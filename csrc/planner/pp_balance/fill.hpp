// pp-balance, third part: the short sequences, so many seconds of them on each rank.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/types.hpp"

namespace hdp {

using Bin = std::vector<SequenceId>;  // sequence ids of a micro-batch of one rank

struct Filling {
  std::vector<std::vector<Bin>> bins;  // by rank: those that it needs, then others
  std::vector<double> seconds;         // by rank, at speed 1, without g
};

// The sequences that fit on one rank.
class Shorts {
 public:
  // `order` holds all sequence ids, longest first.
  Shorts(const Problem& problem, const std::vector<SequenceId>& order);

  std::size_t size() const { return shorts_.size(); }
  double total_s() const { return total_s_; }

  // Micro-batches that so many seconds take, if each takes at most bin_s and holds what fits.
  int64_t num_bins(double seconds, double bin_s) const;

  // Splits all of them: rank r gets about wanted_s[r] seconds (at speed 1) in micro-batches of
  // alike times, at least needed[r] of them, more if one would take much longer than bin_s on this
  // rank or not fit. Returns false, and an incomplete filling, if they are too few for what is
  // needed.
  bool fill(const std::vector<int64_t>& needed, const std::vector<double>& wanted_s, double bin_s,
            Filling& filling) const;

 private:
  struct Short {
    SequenceId id = 0;
    int64_t tokens = 0;  // padded
    double seconds = 0;
  };

  const Problem& problem_;
  std::vector<Short> shorts_;  // longest first
  double total_s_ = 0;
  double full_bin_s_ = 0;  // of an average micro-batch that holds nearly as much as it can
};

}  // namespace hdp
