#include "planner/schedule/pipeline.hpp"

#include <algorithm>

namespace hdp {
namespace {

std::size_t index(int64_t value) { return static_cast<std::size_t>(value); }

// Runs operations tick by tick. Micro-batches pass in groups through one chunk after the other;
// passes through a chunk are counted, backward from the last chunk to the first. Stage s runs
// forward i in tick i + s and backward j, which comes behind forward j + w(s), in tick j + w(s) + s:
// forwards first, then backwards from the last stage to the first. So what an operation waits for is
// in an earlier tick or earlier in its own.
class Ticks {
 public:
  Ticks(const Problem& problem, const std::vector<int32_t>& rank_offsets,
        const std::vector<int32_t>& ranks, const std::vector<double>& seconds, int64_t num_ranks)
      : stages_(index(problem.pipeline_stages)),
        chunks_(index(problem.model_chunks)),
        group_(index(group_size(problem))),
        num_ranks_(index(num_ranks)),
        rank_offsets_(rank_offsets),
        ranks_(ranks),
        weights_(problem.row_weights),
        clocks_(num_ranks_ * stages_, 0.0),
        ends_(seconds.size(), 0.0),
        forward_s_(seconds) {
    const auto rows = static_cast<double>(stages_ * chunks_);
    if (weights_.empty()) weights_.assign(stages_ * chunks_, 1 / rows);
    for (double& one : forward_s_) one /= 3;
    line_up();
  }

  std::vector<double> run() {
    const std::size_t passes = chunks_ * positions_.size();
    const std::size_t ticks = passes == 0 ? 0 : passes + warm_up(0);
    for (std::size_t tick = 0; tick < ticks; ++tick) {
      for (std::size_t stage = 0; stage < stages_ && stage <= tick; ++stage) {
        if (tick - stage < passes) forward(tick - stage, stage);
      }
      for (std::size_t stage = stages_; stage-- > 0;) {
        const std::size_t first = warm_up(stage) + stage;
        if (tick >= first && tick - first < passes) backward(tick - first, stage);
      }
    }
    return {clocks_.begin(), clocks_.begin() + static_cast<std::ptrdiff_t>(num_ranks_)};
  }

 private:
  struct Pass {
    std::size_t position = 0;
    std::size_t turn = 0;  // of its group: the chunk, backward counted from the last one
  };

  // What stands at a position: micro-batches, and ranks with padding.
  struct Position {
    std::vector<std::size_t> micro_batches;
    std::vector<std::size_t> padded;
  };

  void line_up() {
    std::vector<std::size_t> counts(num_ranks_, 0);
    for (std::size_t m = 0; m < ends_.size(); ++m) {
      const std::size_t position = counts[index(ranks_[index(rank_offsets_[m])])];
      if (position == positions_.size()) positions_.emplace_back();
      positions_[position].micro_batches.push_back(m);
      for (auto i = rank_offsets_[m]; i < rank_offsets_[m + 1]; ++i) {
        ++counts[index(ranks_[index(i)])];
      }
    }
    if (group_ == 1) return;
    padding_.assign(num_ranks_ * group_, 0.0);
    positions_.resize((positions_.size() + group_ - 1) / group_ * group_);
    for (std::size_t rank = 0; rank < num_ranks_; ++rank) {
      for (std::size_t at = counts[rank]; at % group_ != 0; ++at) {
        positions_[at].padded.push_back(rank);
      }
    }
  }

  std::size_t warm_up(std::size_t stage) const {
    const std::size_t behind = stages_ - 1 - stage;
    return chunks_ == 1 ? behind : 2 * behind + (chunks_ - 1) * stages_;
  }

  Pass pass(std::size_t i) const {
    const std::size_t of_group = group_ * chunks_;
    const std::size_t within = i % of_group;
    return {i / of_group * group_ + within % group_, within / group_};
  }

  void forward(std::size_t i, std::size_t stage) {
    const Pass now = pass(i);
    run_position(now.position, stage, weights_[now.turn * stages_ + stage]);
  }

  void backward(std::size_t j, std::size_t stage) {
    const Pass now = pass(j);
    const std::size_t row = (chunks_ - 1 - now.turn) * stages_ + stage;
    run_position(now.position, stage, 2 * weights_[row]);
  }

  // Every micro-batch takes `passes` x its forward of all rows.
  void run_position(std::size_t position, std::size_t stage, double passes) {
    double* clocks = clocks_.data() + stage * num_ranks_;
    for (const std::size_t m : positions_[position].micro_batches) {
      const int32_t* rank = ranks_.data() + rank_offsets_[m];
      const int32_t* last = ranks_.data() + rank_offsets_[m + 1];
      double end = ends_[m];
      for (const int32_t* one = rank; one != last; ++one) end = std::max(end, clocks[*one]);
      end += passes * forward_s_[m];
      for (const int32_t* one = rank; one != last; ++one) clocks[*one] = end;
      ends_[m] = end;
    }
    for (const std::size_t rank : positions_[position].padded) {
      double& end = padding_[rank * group_ + position % group_];
      end = clocks[rank] = std::max(clocks[rank], end);
    }
  }

  std::size_t stages_;
  std::size_t chunks_;
  std::size_t group_;
  std::size_t num_ranks_;
  const std::vector<int32_t>& rank_offsets_;
  const std::vector<int32_t>& ranks_;
  std::vector<double> weights_;    // by row
  std::vector<double> clocks_;     // by stage, then rank
  std::vector<double> ends_;       // of each micro-batch's latest operation
  std::vector<double> forward_s_;  // of each micro-batch, all rows
  std::vector<double> padding_;    // the same by rank, then place in its last group
  std::vector<Position> positions_;
};

}  // namespace

int64_t first_misplaced(const Problem& problem, const Plan& plan) {
  std::vector<int64_t> counts(index(problem.num_ranks), 0);
  for (int64_t m = 0; m < plan.num_micro_batches(); ++m) {
    const auto first = plan.ranks.begin() + plan.rank_offsets[index(m)];
    const auto last = plan.ranks.begin() + plan.rank_offsets[index(m) + 1];
    const int64_t position = counts[index(*first)];
    if (std::any_of(first, last, [&](int32_t rank) { return counts[index(rank)] != position; })) {
      return m;
    }
    std::for_each(first, last, [&](int32_t rank) { ++counts[index(rank)]; });
  }
  return -1;
}

int64_t group_size(const Problem& problem) {
  return problem.model_chunks > 1 ? problem.pipeline_stages : 1;
}

std::vector<double> pipeline_ends(const Problem& problem, const std::vector<int32_t>& rank_offsets,
                                  const std::vector<int32_t>& ranks,
                                  const std::vector<double>& seconds, int64_t num_ranks) {
  return Ticks(problem, rank_offsets, ranks, seconds, num_ranks).run();
}

}  // namespace hdp
