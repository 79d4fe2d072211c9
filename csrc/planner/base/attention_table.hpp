// Attention as a table: seconds of whole sequences of some lengths, straight lines between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hdp {

struct AttentionPoint {
  int64_t length = 0;
  double seconds = 0;  // of a whole sequence on one rank, forward and backward
};

// Lines from (0, 0) through the points; behind the last one the last line goes on. check() refuses
// points whose lengths do not ascend or whose seconds fall. With others `seconds` never falls from
// one length to the next, rounding included, and is exact at the points.
class AttentionTable {
 public:
  AttentionTable() = default;
  explicit AttentionTable(std::vector<AttentionPoint> points);

  bool empty() const { return points_.empty(); }
  const std::vector<AttentionPoint>& points() const { return points_; }

  double seconds(int64_t length) const;

  // Whether a longer sequence takes at least as much a token as any shorter one, as with a s^2, a
  // sliding window, or no points. Being so at the points is enough: on a line seconds per token
  // only rise or only fall, and the last line rises with the points.
  bool rises_per_token() const { return rises_per_token_; }

  // The most seconds per token that a sequence of at most `longest` >= 1 tokens takes.
  double most_per_token(int64_t longest) const;

 private:
  struct Line {
    double seconds = 0;         // where it starts
    double slope = 0;           // seconds per token
    double limit = 0;           // seconds where it ends
    double most_per_token = 0;  // up to where it starts
  };

  std::size_t line_of(int64_t length) const;

  std::vector<AttentionPoint> points_;
  std::vector<int64_t> starts_;  // length at which each line starts
  std::vector<Line> lines_;
  // Lengths of a bucket have four leading binary digits behind the first in common. The line of
  // the least length of each bucket: between it and the next bucket's a line is searched.
  std::vector<std::size_t> first_lines_;
  bool rises_per_token_ = true;
};

}  // namespace hdp
