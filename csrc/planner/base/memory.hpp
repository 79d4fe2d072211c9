// What fits on a rank: the least degree of a sequence, and the share of a slice's activations that
// has to leave for host memory (ByteScale, equation 3).
#pragma once

#include <cstdint>
#include <optional>

#include "planner/base/types.hpp"

namespace hdp {

// The least degree at which a slice of the sequence fits, offloaded where the problem allows that;
// 0 if there is none. It may be more than the number of ranks. Offload never raises it.
int64_t least_degree(const Problem& problem, int64_t length);

// The least offload ratio at which a slice of that degree fits: 0 if it fits as it is; none if no
// ratio makes it fit, the host has no memory for what leaves, or that cannot reach it within the
// forward time of a sequence that has the ring, of ranks of speed 1, to itself. Above the least
// degree of a sequence there may be degrees without a ratio: their chunks are padded more.
std::optional<double> offload_ratio(const Problem& problem, int64_t length, int64_t degree);

struct MemoryDegree {
  int64_t degree = 1;
  double offload_ratio = 0;
};

// The least degree where memory alone decides on it. The paper leaves open how far offload may
// lower it; here as far as the sequence takes no more than `share_s`, a rank's mean share of the
// compute: on fewer ranks it would outlast the others.
MemoryDegree memory_degree(const Problem& problem, int64_t length, double share_s);

// The share of its activations that a micro-batch keeps on the rank.
double resident_share(const Problem& problem, double offload_ratio);

// The share of its activations that a micro-batch holds at its fullest if it is recomputed: the
// inputs of all layers, and one layer. 1 if that is not known.
double recomputed_share(const CostModel& cost);

// Whether a slice of that degree is recomputed in backward: it fits so, and neither as it is nor by
// offload.
bool recomputes(const Problem& problem, int64_t length, int64_t degree);

// The least degree at which the sequence fits in any of these ways; 0 if there is none up to the
// number of ranks.
int64_t least_recomputed_degree(const Problem& problem, int64_t length);

// Whether a ring holds each sequence, none recomputed or as a stream.
bool rings_hold_all(const Problem& problem);

}  // namespace hdp
