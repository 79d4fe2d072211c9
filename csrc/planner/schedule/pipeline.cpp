#include <algorithm>
#include <numeric>

#include "planner/schedule/schedule.hpp"
#include "planner/schedule/tick_order.hpp"

namespace hdp {
namespace {

// The latest end of these members; several at once, because each maximum waits for the one before.
double latest(const double* ends, const std::vector<std::size_t>& members, std::size_t first,
              std::size_t last) {
  constexpr std::size_t kLanes = 4;
  double latest[kLanes] = {0, 0, 0, 0};
  for (; first + kLanes <= last; first += kLanes) {
    for (std::size_t i = 0; i < kLanes; ++i) {
      latest[i] = std::max(latest[i], ends[members[first + i]]);
    }
  }
  for (; first < last; ++first) latest[0] = std::max(latest[0], ends[members[first]]);
  return std::max(std::max(latest[0], latest[1]), std::max(latest[2], latest[3]));
}

// Ranks are lined up by the length of their lists, the longest first: those that have something at
// a position are the first so many.
class Ticks {
 public:
  Ticks(const Problem& problem, const std::vector<int32_t>& rank_offsets,
        const std::vector<int32_t>& ranks, const std::vector<double>& seconds, int64_t num_ranks,
        const Passing& passing)
      : order_(problem),
        num_ranks_(index(num_ranks)),
        weights_(weights_of_rows(problem)),
        clocks_(num_ranks_ * order_.stages(), 0.0) {
    line_up(rank_offsets, ranks);
    find_rings(rank_offsets, ranks);
    fill(rank_offsets, ranks, seconds, passing);
  }

  std::vector<double> run() {
    order_.run(
        positions_.size() - 1,
        [&](std::size_t position, std::size_t stage, std::size_t row) {
          run_position(position, forward_s_, stage, weights_[row]);
        },
        [&](std::size_t position, std::size_t stage, std::size_t row) {
          run_position(position, backward_s_, stage, weights_[row]);
        });
    std::vector<double> ends;  // the last backward is on the first stage
    for (const std::size_t line : line_of_rank_) ends.push_back(clocks_[line]);
    return ends;
  }

 private:
  // Where a position begins: its lines, its rings, and their members.
  struct Position {
    std::size_t line = 0;
    std::size_t ring = 0;
    std::size_t member = 0;
  };

  // Gives each rank its line and each position its lines.
  void line_up(const std::vector<int32_t>& rank_offsets, const std::vector<int32_t>& ranks) {
    std::vector<std::size_t> counts(num_ranks_, 0);
    for (auto i = index(rank_offsets.front()); i < index(rank_offsets.back()); ++i) {
      ++counts[index(ranks[i])];
    }
    for (std::size_t& count : counts) count = order_.padded(count);
    const std::size_t most = *std::max_element(counts.begin(), counts.end());
    std::vector<std::size_t> shorter_by(most + 1, 0);  // ranks, by what they lack of the longest
    for (const std::size_t count : counts) ++shorter_by[most - count];
    std::vector<std::size_t> next(most + 1, 0);  // line of the next such rank
    std::partial_sum(shorter_by.begin(), shorter_by.end() - 1, next.begin() + 1);
    positions_.resize(most + 1);
    for (std::size_t position = 0; position < most; ++position) {
      positions_[position + 1].line = positions_[position].line + next[most - position];
    }
    line_of_rank_.resize(num_ranks_);
    for (std::size_t rank = 0; rank < num_ranks_; ++rank) {
      line_of_rank_[rank] = next[most - counts[rank]]++;
    }
  }

  // Gives each micro-batch its position, and each position room for its rings.
  void find_rings(const std::vector<int32_t>& rank_offsets, const std::vector<int32_t>& ranks) {
    std::vector<std::size_t> done(num_ranks_, 0);
    for (std::size_t m = 0; m + 1 < rank_offsets.size(); ++m) {
      const std::size_t first = index(rank_offsets[m]);
      const std::size_t last = index(rank_offsets[m + 1]);
      position_of_.push_back(done[index(ranks[first])]);
      for (std::size_t i = first; i < last; ++i) ++done[index(ranks[i])];
      if (last - first == 1) continue;
      Position& behind = positions_[position_of_.back() + 1];
      ++behind.ring;
      behind.member += last - first;
    }
    for (std::size_t position = 1; position < positions_.size(); ++position) {
      positions_[position].ring += positions_[position - 1].ring;
      positions_[position].member += positions_[position - 1].member;
    }
  }

  void fill(const std::vector<int32_t>& rank_offsets, const std::vector<int32_t>& ranks,
            const std::vector<double>& seconds, const Passing& passing) {
    forward_s_.assign(positions_.back().line, 0.0);
    backward_s_.assign(positions_.back().line, 0.0);
    ends_.assign(positions_.back().line, 0.0);
    rings_.resize(positions_.back().ring);
    members_.resize(positions_.back().member);
    std::vector<Position> next = positions_;
    for (std::size_t m = 0; m < seconds.size(); ++m) {
      const std::size_t first = index(rank_offsets[m]);
      const std::size_t last = index(rank_offsets[m + 1]);
      Position& here = next[position_of_[m]];
      const PassTimes passes(seconds[m], passing.is_twice(m));
      for (std::size_t i = first; i < last; ++i) {
        const std::size_t line = line_of_rank_[index(ranks[i])];
        forward_s_[here.line + line] = passes.forward_s;
        backward_s_[here.line + line] = passes.backward_s;
        if (last - first > 1) members_[here.member++] = line;
      }
      if (last - first > 1) rings_[here.ring++] = here.member;
    }
  }

  // Every micro-batch takes a row's share of its `seconds`, those of a pass.
  void run_position(std::size_t position, const std::vector<double>& seconds, std::size_t stage,
                    double share) {
    const Position& here = positions_[position];
    const Position& behind = positions_[position + 1];
    double* clocks = clocks_.data() + stage * num_ranks_;
    double* ends = ends_.data() + here.line;
    const double* pass_s = seconds.data() + here.line;
    const std::size_t num = behind.line - here.line;
    for (std::size_t i = 0; i < num; ++i) ends[i] = std::max(ends[i], clocks[i]);
    std::size_t begin = here.member;
    for (std::size_t ring = here.ring; ring < behind.ring; ++ring) {
      const double start = latest(ends, members_, begin, rings_[ring]);
      for (; begin < rings_[ring]; ++begin) ends[members_[begin]] = start;
    }
    for (std::size_t i = 0; i < num; ++i) clocks[i] = ends[i] += share * pass_s[i];
  }

  TickOrder order_;
  std::size_t num_ranks_;
  std::vector<double> weights_;  // by row
  std::vector<double> clocks_;   // by stage, then line
  std::vector<std::size_t> line_of_rank_;
  std::vector<std::size_t> position_of_;  // by micro-batch
  std::vector<Position> positions_;       // and where the last one ends
  std::vector<double> forward_s_;         // by position, then line: all rows; 0 of padding
  std::vector<double> backward_s_;        // likewise
  std::vector<double> ends_;              // likewise: of its latest operation
  std::vector<std::size_t> members_;      // lines of rings, ring after ring
  std::vector<std::size_t> rings_;        // where each ends in them
};

}  // namespace

int64_t first_misplaced(const Problem& problem, const Plan& plan) {
  std::vector<int64_t> counts(index(problem.num_ranks), 0);
  for (int64_t m = 0; m < plan.num_micro_batches(); ++m) {
    const int64_t position = counts[index(*plan.ring(m).first)];
    for (const int32_t rank : plan.ring(m)) {
      if (counts[index(rank)]++ != position) return m;
    }
  }
  return -1;
}

std::vector<double> weights_of_rows(const Problem& problem) {
  if (!problem.row_weights.empty()) return problem.row_weights;
  const std::size_t rows = index(problem.pipeline_stages * problem.model_chunks);
  return std::vector<double>(rows, 1 / static_cast<double>(rows));
}

int64_t group_size(const Problem& problem) {
  return problem.model_chunks > 1 ? problem.pipeline_stages : 1;
}

std::vector<double> pipeline_ends(const Problem& problem, const std::vector<int32_t>& rank_offsets,
                                  const std::vector<int32_t>& ranks,
                                  const std::vector<double>& seconds, int64_t num_ranks,
                                  const Passing& passing) {
  const bool is_whole = std::all_of(passing.num_parts.begin(), passing.num_parts.end(),
                                    [](int32_t parts) { return parts == 1; });
  return is_whole ? Ticks(problem, rank_offsets, ranks, seconds, num_ranks, passing).run()
                  : streamed_ends(problem, rank_offsets, ranks, seconds, num_ranks, passing);
}

}  // namespace hdp
