// Which source the next sequence comes from, so that every source keeps its share.
#pragma once

#include <cstdint>
#include <vector>

namespace hdp {

// Sequences that sources hold ready, source after source: those of source i are first[i] to
// first[i + 1] - 1, of which the first used[i] are drawn.
struct Ready {
  const int64_t* lengths;  // tokens of each
  const int64_t* amounts;  // what each adds to its source's share, in the unit of the weights
  std::vector<int64_t> first;
  std::vector<int64_t> used;
};

// What a draw may still take.
struct Room {
  int64_t sequences;
  int64_t tokens;
  bool must_take;  // the next sequence is taken even where it has more tokens
};

struct Mixed {
  std::vector<int32_t> sources;  // of the sequences, in the order in which they were drawn
  std::vector<int64_t> turns;    // how many of its source's were drawn before each
  int32_t source;                // has nothing ready and may be next; -1 where the room is used up
};

// Draws until the room is used up or a source that may be next has nothing ready.
//
// What is `owed` to a source is its share of all that was drawn, less what was drawn of it. A
// sequence of amount m adds weights[i] * m to what every source is owed and takes m off its own.
// Next is, of the sources that are not ahead of their share, the one whose next sequence falls due
// first: when all that was drawn has grown by (m - owed) / weight, its share will just cover it.
// Ties go to the first. Sources of weight 0 are left out.
//
// That is worst-case fair weighted fair queueing (Bennett and Zhang, INFOCOM 1996), with what was
// drawn for time. No source is ever ahead of its share by more than its own longest sequence, nor
// behind it by more than the longest of all, which no order could promise. Taking the source that
// is owed the most would let one fall behind further: 1.6 times that were found.
//
// Throws std::invalid_argument for sizes that do not belong together, weights that are negative,
// not finite or all 0, what is owed that is not finite, and sequences without a token.
Mixed mix(const std::vector<double>& weights, std::vector<double>& owed, Ready& ready, Room room);

}  // namespace hdp
