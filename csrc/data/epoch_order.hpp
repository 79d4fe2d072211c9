// The order of one epoch: a permutation that gives the row at any position and keeps no table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hdp {

// Permutes 0 .. num_rows - 1 by a Feistel network over pairs (left, right), left below an even
// `a`, right below `b`, with a * b >= num_rows as tight as a and b near the square root can be. In
// turns a round adds to one half, modulo its size, a number below that size which only the other
// half and the round's key decide: whatever the numbers, one can go back, so it is a permutation
// of all pairs (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). A pair that
// stands for no row is permuted again until one does (cycle-walking, same paper): a * b / num_rows
// walks in the mean, at most two (one row), about 1 + 1 / sqrt(num_rows) for many. An even `a`
// reaches odd permutations, too.
//
// Rounds. Luby and Rackoff's proof wants four with random functions, Patarin's five or six for
// about sqrt(num_rows) positions; an epoch takes all of them. Of long epochs four fail our own
// statistics (how far rows lie apart whose positions differ by b alone). Tiny ones want still
// more, for their functions have few values: with eight rounds some of the 120 orders of five rows
// come too often, with twelve all 720 of six come alike. Twelve cost a fifth more time than eight.
//
// Only 64-bit integers: every machine gives the same rows. A change of any number here is another
// order of every run's data: it needs a new version in megatron_hdp/data/shuffles.py.
class EpochOrder {
 public:
  static constexpr int64_t kMaxRows = int64_t{1} << 48;
  static constexpr std::size_t kNumRounds = 12;

  // Alike where all four are. Throws std::invalid_argument unless 1 <= num_rows <= kMaxRows.
  EpochOrder(int64_t num_rows, uint64_t seed, uint64_t source, uint64_t epoch);

  // The row at a position, both below num_rows.
  int64_t row(int64_t position) const;

  // The rows at `count` positions from `first` on. Throws std::invalid_argument where the epoch
  // does not have them all.
  std::vector<int64_t> rows(int64_t first, int64_t count) const;

 private:
  // How many rows are computed side by side: the three multiplications of a round wait for each
  // other, and those of other rows fill the time.
  static constexpr int64_t kAtOnce = 8;

  template <std::size_t kCount>
  void permute(std::array<uint64_t, kCount>& left, std::array<uint64_t, kCount>& right) const;

  // Writes the rows at `kCount` positions from `position` on.
  template <std::size_t kCount>
  void write_rows(int64_t position, int64_t* rows) const;

  uint64_t num_rows_;
  uint64_t left_size_;   // a
  uint64_t right_size_;  // b
  std::array<uint64_t, kNumRounds> keys_;
};

}  // namespace hdp
