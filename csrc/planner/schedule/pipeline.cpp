#include "planner/schedule/pipeline.hpp"

#include <algorithm>

namespace hdp {
namespace {

std::size_t index(int64_t value) { return static_cast<std::size_t>(value); }

// Runs operations in waves. Wave t: every forward t, from the first stage to the last; then, on
// each stage, backward t - (P - 1 - stage), which is the one that 1F1B puts behind forward t. What
// an operation waits for is in an earlier wave or earlier in its own.
class Waves {
 public:
  Waves(const std::vector<int32_t>& rank_offsets, const std::vector<int32_t>& ranks,
        const std::vector<double>& seconds, int64_t num_ranks, int64_t stages)
      : rank_offsets_(rank_offsets),
        ranks_(ranks),
        seconds_(seconds),
        stages_(index(stages)),
        clocks_(index(num_ranks) * stages_, 0.0),
        ends_(seconds.size(), 0.0) {
    std::vector<std::size_t> counts(index(num_ranks), 0);
    for (std::size_t m = 0; m < seconds.size(); ++m) {
      const std::size_t position = counts[index(ranks[index(rank_offsets[m])])];
      if (position == at_position_.size()) at_position_.emplace_back();
      at_position_[position].push_back(m);
      for (auto i = rank_offsets[m]; i < rank_offsets[m + 1]; ++i) ++counts[index(ranks[index(i)])];
    }
  }

  std::vector<double> run() {
    const std::size_t longest_list = at_position_.size();
    for (std::size_t wave = 0; wave < longest_list + stages_ - 1; ++wave) {
      if (wave < longest_list) {
        for (const std::size_t m : at_position_[wave]) forward(m);
      }
      for (std::size_t stage = 0; stage < stages_; ++stage) {
        const std::size_t warm_up = stages_ - 1 - stage;
        if (wave < warm_up || wave - warm_up >= longest_list) continue;
        for (const std::size_t m : at_position_[wave - warm_up]) backward(m, stage);
      }
    }
    std::vector<double> rank_ends;
    for (std::size_t clock = 0; clock < clocks_.size(); clock += stages_) {
      rank_ends.push_back(clocks_[clock]);  // the last backward ends on the first stage
    }
    return rank_ends;
  }

 private:
  void forward(std::size_t m) {
    const double duration = seconds_[m] / (3 * static_cast<double>(stages_));
    double end = 0;
    for (std::size_t stage = 0; stage < stages_; ++stage) {
      end = run_on(m, stage, end, duration);
    }
    ends_[m] = end;
  }

  // Waves put the next stage's backward of m into an earlier wave.
  void backward(std::size_t m, std::size_t stage) {
    ends_[m] = run_on(m, stage, ends_[m], 2 * seconds_[m] / (3 * static_cast<double>(stages_)));
  }

  double run_on(std::size_t m, std::size_t stage, double ready, double duration) {
    const auto first = ranks_.begin() + rank_offsets_[m];
    const auto last = ranks_.begin() + rank_offsets_[m + 1];
    double start = ready;
    for (auto rank = first; rank != last; ++rank) start = std::max(start, clock(*rank, stage));
    for (auto rank = first; rank != last; ++rank) clock(*rank, stage) = start + duration;
    return start + duration;
  }

  double& clock(int32_t rank, std::size_t stage) { return clocks_[index(rank) * stages_ + stage]; }

  const std::vector<int32_t>& rank_offsets_;
  const std::vector<int32_t>& ranks_;
  const std::vector<double>& seconds_;
  std::size_t stages_;
  std::vector<double> clocks_;  // by rank, then stage
  std::vector<double> ends_;    // of each micro-batch's latest operation
  std::vector<std::vector<std::size_t>> at_position_;
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

std::vector<double> pipeline_ends(const std::vector<int32_t>& rank_offsets,
                                  const std::vector<int32_t>& ranks,
                                  const std::vector<double>& seconds, int64_t num_ranks,
                                  int64_t stages) {
  return Waves(rank_offsets, ranks, seconds, num_ranks, stages).run();
}

}  // namespace hdp
