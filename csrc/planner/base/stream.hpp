// Streams: a sequence in parts of equal tokens on a ring, which keeps only keys and values between
// forward and backward, and is computed again in backward, from the last part to the first. Layers
// with a window keep the halo of the next part. On a stage of several it keeps what each part has
// come with as well, always on the device. Of its P micro-batches between forward and backward each
// has the capacity to itself.
#pragma once

#include <cstdint>
#include <optional>

#include "planner/base/cost_model.hpp"
#include "planner/base/types.hpp"

namespace hdp {

struct Stream {
  int64_t num_parts = 2;
  int64_t host_parts = 0;  // the last ones: their keys, with the sums of gradients, on the host
  int64_t tokens_on_a_rank = 0;  // padded, of its fullest part

  bool on_host() const { return host_parts > 0; }
};

// How a sequence streams on so many ranks whose memory does not hold a slice of it: in the fewest
// parts that fit beside what is kept, on the device if that takes at most twice as many parts as on
// the host. Else in twice as many: the first ones keep on the device what it then has room for, the
// others on the host, if that has the memory. None if it may not stream, if a slice fits, or if no
// part fits.
// With stages: in the number of parts, that or more, in which it is likely to pass all of them
// soonest.
std::optional<Stream> stream_of(const Problem& problem, int64_t length, int64_t degree);

// A micro-batch of a plan that streams, in as many parts as the plan says.
Stream planned_stream(const Problem& problem, const Plan& plan, int64_t micro_batch);

// Whether a sequence may stream so.
bool may_stream(const Problem& problem, int64_t length, int64_t degree);

// What part of a stream's time goes with the square of its tokens. Its parts have equal tokens, so
// that their times grow by it.
double growth_of_stream(const Problem& problem, int64_t length);

// Seconds of its last part, of all.
double longest_part_s(const Problem& problem, int64_t length, const Stream& stream,
                      double seconds);

// The least degree at which the sequence may stream; 0 if there is none up to the number of ranks.
int64_t least_stream_degree(const Problem& problem, int64_t length);

// Seconds of a stream that has a ring to itself, all included. `speed`: of the slowest member.
double stream_s(const Problem& problem, int64_t length, int64_t degree, const Stream& stream,
                Links links, double speed = 1);

// Tokens whose keys and values take as many bytes as a member sends in one forward pass of a stream,
// times D / (D - 1).
double stream_traffic_tokens(const CostModel& cost, int64_t length, const Stream& stream);

}  // namespace hdp
