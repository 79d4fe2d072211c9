// round-balance, third part: micro-batches, equally many for every rank.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/types.hpp"
#include "planner/round_balance/dealing.hpp"

namespace hdp {

class BlockRounds {
 public:
  // Packs the sequences of each block.
  BlockRounds(const Problem& problem, Dealing dealing);

  // Gives every rank as many micro-batches as the one with the most has, a multiple of `group`:
  // parts micro-batches of several sequences, then moves short sequences from ranks that have more
  // than they need, the latest first, then widens micro-batches to twice their ranks. False if
  // there are too few sequences.
  bool level(int64_t group);

  // Round after round, with those of wide blocks first, or last.
  Plan plan(bool wide_first) const;

 private:
  using MicroBatch = std::vector<SequenceId>;  // longest first

  int64_t num_spare(std::size_t block) const;
  void part(std::size_t block);
  void part_where_all_lack();
  void move_shorts();
  bool widen(std::size_t leaf);
  bool has_one_everywhere(std::size_t block) const;
  bool has_room(std::size_t block, const MicroBatch& sequences) const;
  MicroBatch one_of_all(std::size_t block) const;
  void drop_one_of_all(std::size_t block);
  std::vector<int64_t> counts() const;

  const Problem& problem_;
  Blocks blocks_;
  std::vector<std::vector<MicroBatch>> micro_batches_;  // by block
  std::vector<int64_t> lacking_;                        // by rank
};

}  // namespace hdp
