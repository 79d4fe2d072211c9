// round-balance, first part: sequences on aligned blocks of ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/types.hpp"

namespace hdp {

// The ranks as the leaves of a binary tree. Block 1 holds all of them, block i the ranks of blocks
// 2 i and 2 i + 1. Where the ranks are no power of two some leaves stand for none, and a block with
// one of them takes nothing.
//
// A rank runs the micro-batches of its wider blocks first. So all ranks of a block have run the
// same before it, and none waits: a rank ends when all blocks that it lies in have had their time.
class Blocks {
 public:
  explicit Blocks(int64_t num_ranks);

  // Blocks have the numbers 1 to 2 num_leaves - 1, those of one rank come last.
  std::size_t num_leaves() const { return num_leaves_; }
  int64_t degree(std::size_t block) const;
  int32_t first_rank(std::size_t block) const;
  bool is_whole(std::size_t block) const { return first_rank(block) + degree(block) <= num_ranks_; }
  std::size_t leaf(int64_t rank) const { return num_leaves_ + index(rank); }

  // When the last rank of a block ends, with what wider blocks take; infinite if it is not whole.
  double end_s(std::size_t block) const;

  // The block of a degree, a power of two up to num_leaves, whose last rank ends first; of equals
  // the first. All may end never.
  std::size_t earliest(int64_t degree) const;

  void add(std::size_t block, double seconds);

 private:
  // Entries of `least_`: when the last rank of a block ends that lies so many halvings below
  // `block`, least of all, if the ranks begin with `block`'s own.
  std::size_t entry(std::size_t block, std::size_t below) const { return offsets_[block] + below; }
  void update(std::size_t block);

  int64_t num_ranks_;
  std::size_t num_leaves_ = 1;
  std::size_t depth_ = 0;  // of the leaves
  std::vector<std::size_t> offsets_;
  std::vector<double> least_;
  std::vector<double> own_s_;  // by block
};

}  // namespace hdp
