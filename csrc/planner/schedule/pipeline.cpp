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
    fill_positions(rank_offsets, ranks, seconds, passing);
  }

  std::vector<double> run() {
    order_.run(
        positions_.size(),
        [&](std::size_t position, std::size_t stage, std::size_t row) {
          Position& here = positions_[position];
          run_position(here, here.forward_s, stage, weights_[row]);
        },
        [&](std::size_t position, std::size_t stage, std::size_t row) {
          Position& here = positions_[position];
          run_position(here, here.backward_s, stage, weights_[row]);
        });
    std::vector<double> ends;  // the last backward is on the first stage
    for (const std::size_t line : line_of_rank_) ends.push_back(clocks_[line]);
    return ends;
  }

 private:
  struct Position {
    std::vector<double> forward_s;     // by line: all rows; 0 of padding
    std::vector<double> backward_s;    // likewise
    std::vector<double> ends;          // by line: of its latest operation
    std::vector<std::size_t> members;  // lines of rings, ring after ring
    std::vector<std::size_t> rings;    // where each ring ends in them
  };

  // Gives each rank its line and positions their sizes.
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
    positions_.resize(most);
    for (std::size_t position = 0; position < most; ++position) {
      const std::size_t size = next[most - position];
      positions_[position].forward_s.assign(size, 0.0);
      positions_[position].backward_s.assign(size, 0.0);
      positions_[position].ends.assign(size, 0.0);
    }
    line_of_rank_.resize(num_ranks_);
    for (std::size_t rank = 0; rank < num_ranks_; ++rank) {
      line_of_rank_[rank] = next[most - counts[rank]]++;
    }
  }

  void fill_positions(const std::vector<int32_t>& rank_offsets, const std::vector<int32_t>& ranks,
                      const std::vector<double>& seconds, const Passing& passing) {
    std::vector<std::size_t> done(num_ranks_, 0);
    for (std::size_t m = 0; m < seconds.size(); ++m) {
      const std::size_t first = index(rank_offsets[m]);
      const std::size_t last = index(rank_offsets[m + 1]);
      Position& position = positions_[done[index(ranks[first])]];
      const PassTimes passes(seconds[m], passing.is_twice(m));
      for (std::size_t i = first; i < last; ++i) {
        const std::size_t line = line_of_rank_[index(ranks[i])];
        position.forward_s[line] = passes.forward_s;
        position.backward_s[line] = passes.backward_s;
        if (last - first > 1) position.members.push_back(line);
        ++done[index(ranks[i])];
      }
      if (last - first > 1) position.rings.push_back(position.members.size());
    }
  }

  // Every micro-batch takes a row's share of its `seconds`, those of a pass.
  void run_position(Position& position, const std::vector<double>& seconds, std::size_t stage,
                    double share) {
    double* clocks = clocks_.data() + stage * num_ranks_;
    double* ends = position.ends.data();
    const std::size_t num = position.ends.size();
    for (std::size_t i = 0; i < num; ++i) ends[i] = std::max(ends[i], clocks[i]);
    std::size_t begin = 0;
    for (const std::size_t end : position.rings) {
      const double start = latest(ends, position.members, begin, end);
      for (; begin < end; ++begin) ends[position.members[begin]] = start;
    }
    const double* pass_s = seconds.data();
    for (std::size_t i = 0; i < num; ++i) clocks[i] = ends[i] += share * pass_s[i];
  }

  TickOrder order_;
  std::size_t num_ranks_;
  std::vector<double> weights_;  // by row
  std::vector<double> clocks_;   // by stage, then line
  std::vector<std::size_t> line_of_rank_;
  std::vector<Position> positions_;
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
