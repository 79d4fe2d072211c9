// Fills the spare room of ring members with whole short sequences, so that they need no
// micro-batch (and no g) of their own.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "planner/rings/batch.hpp"
#include "planner/rings/place_set.hpp"

namespace hdp {

class SpareRoom {
 public:
  // May place the sequences at `shorts`, places in the batch.
  SpareRoom(const Batch& batch, PlaceSet shorts);

  // Gives each member up to `room` padded tokens of alike time, appends which, and returns the
  // seconds that the ring takes longer. The time goes round by round: the first member sets a
  // round's length, the others are filled up to it.
  double fill(const std::vector<int32_t>& ranks, int64_t room, Locals& locals);

  // The places of the sequences not placed.
  PlaceSet take_remaining() { return std::move(shorts_); }

 private:
  struct Member {
    int64_t room = 0;
    double seconds = 0;
    std::vector<SequenceId> sequences;
  };

  bool place_longest(Member& member, int64_t longest);

  const Batch& batch_;
  PlaceSet shorts_;
};

}  // namespace hdp
