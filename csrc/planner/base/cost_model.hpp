// The cost model: what a sequence costs on a ring, and what no plan can beat.
#pragma once

#include <cstdint>

#include "planner/base/types.hpp"

namespace hdp {

// Of what ranks compute a third is forward, which runs twice where backward computes it again.
constexpr double kComputedTwice = 4.0 / 3;

// Seconds of attention of a whole sequence on one rank: a s^2 + attention_b s, or what the table
// says.
double attention_s(const CostModel& cost, int64_t length);

// The same per token.
double attention_per_token_s(const CostModel& cost, int64_t length);

// Seconds of a whole sequence on one rank: attention and what is linear. It never falls with the
// length.
double compute_s(const CostModel& cost, int64_t length);

// Seconds of a micro-batch of so many ranks whatever it holds: g, and one block a step. The whole
// local sequences of a member are one block more.
double fixed_s(const CostModel& cost, int64_t degree);

// Seconds of a member of a ring of so many tokens for merging what its steps give.
double merge_s(const CostModel& cost, int64_t degree, double tokens);

// Whether a ring costs more by being wider: in blocks, in merging or in latency.
bool width_costs(const CostModel& cost);

// What the members of a ring send on.
struct Links {
  double bytes_per_s = 0;  // of each member
  double hop_s = 0;        // latency of a hop, all layers
  // Of a hop: gradients go home to another node in one piece, on one link.
  double home_s_per_byte = 0;

  bool operator==(const Links& other) const {
    return bytes_per_s == other.bytes_per_s && hop_s == other.hop_s &&
           home_s_per_byte == other.home_s_per_byte;
  }
};

Links links_in_a_node(const CostModel& cost);

// Between nodes, `number` of them side by side: a plain ring uses one. A double ring is groups of
// neighbours, each in one node, and uses as many as a group has members (runtime,
// `double_ring.py`).
Links links_between_nodes(const CostModel& cost, int64_t number);

// Those of a ring.
Links links_of(const CostModel& cost, Span ring);

// The same of neighbouring ranks.
Links links_of_block(const CostModel& cost, int64_t first, int64_t degree);

// Those of a ring in whole nodes, as far as its degree allows it.
Links likely_links(const CostModel& cost, int64_t degree);

// What no ring of this degree can beat.
Links best_links(const CostModel& cost, int64_t degree);

// Seconds that one rank of a ring sends, latency left out: K and V once forward, K, V and their
// gradients backward, (degree - 1) / degree of the ring's tokens each.
double transfer_s(const CostModel& cost, int64_t degree, double tokens, Links links);

// What a double ring exposes besides.
double home_s(const CostModel& cost, int64_t degree, double tokens, Links links);

// Seconds of traffic that attention does not hide on a member of a ring of so many tokens, which
// takes `attention_s` for its share. It has degree - 1 hops in each pass and the same attention in
// each step, a third of it forward; a hop hides under the step before it.
// `num_forwards`: 2 if it is computed again in backward.
double exposed_s(const CostModel& cost, int64_t degree, double tokens, double attention_s,
                 Links links, double num_forwards = 1);

// Seconds of projections that a member of a ring is spared: keys and values of some heads travel made
// beside the latents, as many as attention hides, which takes a member of speed 1 `attention_s`.
double spared_s(const CostModel& cost, int64_t degree, double tokens, double attention_s,
                Links links);

// Seconds of one sequence that has a ring to itself, its exposed traffic included, fixed_s left
// out. `speed` is that of the slowest member.
double ring_s(const CostModel& cost, int64_t length, int64_t degree, Links links, double speed = 1);

// The least number of ranks, a fraction perhaps, on which compute, blocks and merging of a sequence
// take `seconds`; infinite if there is none.
double parts_within(const CostModel& cost, int64_t length, double compute_s, double seconds);

// The greatest degree in [1, num_ranks] at which the hops of a pass take no longer than its steps:
// less than a step's worth of traffic is exposed.
int64_t greatest_hidden_degree(const CostModel& cost, int64_t length, int64_t num_ranks);

// The greatest length whose compute_s is at most `seconds` (at most 2^41).
int64_t length_within(const CostModel& cost, double seconds);

// Seconds of all sequences on one rank of speed 1, without g.
double total_compute_s(const Problem& problem);

// The sum of all ranks' speeds.
double total_speed(const Problem& problem);

}  // namespace hdp
