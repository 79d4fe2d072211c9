// What no plan can beat.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/types.hpp"

namespace hdp {

// max(total compute / sum of speeds, the longest sequence's own time at its best degree on the
// fastest ranks). At every degree a sequence's time grows with its length, as compute does: the
// longest one decides. The bound holds for any attention that is not negative: a ring takes D
// blocks, b s / D, the attention of a step, and D - 1 times the greater of a hop's traffic and a
// step's attention in each pass, of all its sequences; each sum is at least that of one.
double lower_bound_s(const Problem& problem);

// The least time of a ring of its own that a sequence can have, on the fastest ranks.
double least_own_s(const Problem& problem, int64_t length);

// At least lower_bound_s, and no plan takes less either (one pipeline stage): the least T for which
// compute and what is certainly lost fit into T x the sum of speeds. Lost are, in rank-seconds:
//
// - g for every C tokens, since a rank holds at most C tokens in a micro-batch; and D blocks, D
//   being its ranks, at least as many as each of its sequences needs for its memory.
// - Exposed traffic. In a makespan T a sequence s needs a degree at which its slices fit and its
//   own time is at most T. Be D(s) the least of these. The D ranks of a ring send for q a hop, in
//   all, and have attention / D a step: with e(s, D) = (D - 1) (q - attention / D), latency left
//   out and both passes in one, a ring loses at least the sum of e over its sequences, if that is
//   positive. Of a sequence it is at least the least e(s, D) over D >= D(s), e(s) for short; e is
//   convex in D, so that this is at the greater of D(s) and sqrt(attention / q). At one degree
//   a sequence with less attention a token is the more exposed one, for traffic is the same for
//   every token; so in a ring that loses anything, the sum of e over those of its sequences that
//   are among the k with the most attention a token of the batch is at most what it loses. All
//   rings together lose at least the sum of e(s) over these k, for every k.
//   Where attention per token never falls with the length (AttentionTable::rises_per_token; so
//   with a s^2) these are the k longest. Where it falls, short sequences are among them, too. They
//   may hide a long one's traffic, at most by all of their attention: that much less is lost.
// - Waiting for slow ranks, where memory does not let a sequence do without them, except for what
//   the faster members' spare room can hold meanwhile. What fits into it takes at most the compute
//   of one sequence of so many tokens where compute per token never falls with the length; else
//   the most per token of any that fits, for every token.
//
// A stream exposes other traffic and needs no number of ranks: where sequences may stream, the last
// two count for nothing, a sequence's D is 1, its own time that of a ring or 4/3 of what is computed,
// if that is less, and those that no ring holds take 4/3 of their compute. A part of a stream is a
// micro-batch of at most C tokens that costs g and D blocks at least.
double tight_bound_s(const Problem& problem);

}  // namespace hdp
