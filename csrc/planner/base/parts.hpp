// Parts of a micro-batch: how large they are, and what rings expose that run in them. As
// megatron_hdp/planner/parts.py says, operation by operation.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/cost_model.hpp"
#include "planner/base/types.hpp"

namespace hdp {

// What a part holds of sequences that follow each other.
struct PartSize {
  double tokens = 0;
  double earlier = 0;  // tokens that earlier parts hold of the sequence that it begins within
  double squares = 0;  // what it adds to the squares of the sequences' lengths
};

// Parts of equal time, if a sequence's first x tokens take x (x + linear_tokens).
std::vector<PartSize> part_sizes(const std::vector<double>& lengths, int64_t num_parts,
                                 double linear_tokens);

// The times of the parts of what takes pass_s. All the same, unless they grow.
class PartTimes {
 public:
  PartTimes(double pass_s, int64_t num_parts, double growth) {
    const auto parts = static_cast<double>(num_parts);
    more_s_ = 2 * growth * pass_s / (parts * parts);
    first_s_ = (1 - growth) * pass_s / parts + more_s_ / 2;
  }

  // From 0 on.
  double of(int64_t number) const { return first_s_ + more_s_ * static_cast<double>(number); }

 private:
  double first_s_;
  double more_s_;
};

// Whether a part's queries go around its ring: they take fewer bytes than its keys and those of
// earlier parts.
bool queries_travel(const PartSize& size, double query_ratio);

// Tokens of which keys and values would take as many bytes as go around a ring for a part: its
// queries, if that is less than its keys and those of earlier parts.
double traffic_tokens(const PartSize& size, double query_ratio);

// Seconds of traffic that attention does not hide on a member of a ring in parts of these sizes,
// which takes `attention_s` for its share of all of them. Of a whole micro-batch keys travel.
double exposed_s(const CostModel& cost, int64_t degree, const std::vector<PartSize>& sizes,
                 double attention_s, Links links, double num_forwards = 1);

// What a micro-batch in parts takes besides, on a rank of speed 1: fixed_s for each part, and for
// each but the first a block a step and a merged result for the keys of earlier ones. Keys that are
// made of latents: `made_again_s`.
double fixed_s(const CostModel& cost, int64_t degree, double tokens, int64_t num_parts);

// What making keys and values of latents takes a member of a ring more than if its micro-batch ran
// whole: those of earlier parts for each part; where queries travel, once each and on one member.
// Less what it is spared: `attention_s` is that of a member of speed 1, all parts. A micro-batch of
// so many tokens runs whole where it has less than two sizes.
double made_again_s(const CostModel& cost, int64_t degree, double tokens,
                    const std::vector<PartSize>& sizes, double attention_s, Links links);

// ring_s and fixed_s, on ranks of this speed, of one sequence that has a ring to itself and runs in
// parts of these sizes, or whole where there is one.
double ring_s(const CostModel& cost, int64_t length, int64_t degree,
              const std::vector<PartSize>& sizes, Links links, double speed = 1);

// The same of one that is computed again in backward.
double recomputed_ring_s(const CostModel& cost, int64_t length, int64_t degree,
                         const std::vector<PartSize>& sizes, Links links, double speed = 1);

}  // namespace hdp
