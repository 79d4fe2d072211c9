// The 1F1B schedule of micro-batches in parts.
#include <algorithm>

#include "planner/schedule/schedule.hpp"

namespace hdp {
namespace {

// Runs operations tick by tick, as the schedule of whole micro-batches does: stage s runs forward i
// in tick i + s, and backward j in tick j + P - 1. What a part waits for is in an earlier tick, or
// earlier in its own. Members of a ring have one clock while they run it, so it runs once.
class Streams {
 public:
  Streams(const Problem& problem, const std::vector<int32_t>& rank_offsets,
          const std::vector<int32_t>& ranks, const std::vector<double>& seconds,
          const std::vector<int32_t>& num_parts, int64_t num_ranks)
      : stages_(index(problem.pipeline_stages)),
        num_ranks_(index(num_ranks)),
        weights_(problem.row_weights),
        rank_offsets_(rank_offsets),
        ranks_(ranks),
        seconds_(seconds),
        num_parts_(num_parts),
        clocks_(stages_ * num_ranks_, 0.0) {
    if (weights_.empty()) weights_.assign(stages_, 1 / static_cast<double>(stages_));
    std::vector<std::size_t> done(num_ranks_, 0);
    for (std::size_t m = 0; m < seconds.size(); ++m) {
      first_part_.push_back(ends_.size());
      ends_.resize(ends_.size() + index(num_parts[m]), 0.0);
      const std::size_t position = done[index(ranks[index(rank_offsets[m])])];
      for (int32_t i = rank_offsets[m]; i < rank_offsets[m + 1]; ++i) ++done[index(ranks[index(i)])];
      if (position == positions_.size()) positions_.emplace_back();
      positions_[position].push_back(m);
    }
  }

  std::vector<double> run() {
    const std::size_t ticks = positions_.empty() ? 0 : positions_.size() + stages_ - 1;
    for (std::size_t tick = 0; tick < ticks; ++tick) {
      for (std::size_t stage = 0; stage < stages_ && stage <= tick; ++stage) {
        if (tick - stage >= positions_.size()) continue;
        for (const std::size_t m : positions_[tick - stage]) forward(m, stage);
      }
      if (tick + 1 < stages_) continue;
      for (std::size_t stage = stages_; stage-- > 0;) {
        for (const std::size_t m : positions_[tick + 1 - stages_]) backward(m, stage);
      }
    }
    return {clocks_.begin(), at(clocks_, num_ranks_)};  // the last backward is on the first stage
  }

 private:
  void forward(std::size_t m, std::size_t stage) {
    double clock = start_of(m, stage);
    const double part_s = seconds_[m] / 3 * weights_[stage] / static_cast<double>(num_parts_[m]);
    const auto first = at(ends_, first_part_[m]);
    for (auto end = first; end != first + num_parts_[m]; ++end) {
      *end = clock = std::max(clock, *end) + part_s;
    }
    leave(m, stage, clock);
  }

  void backward(std::size_t m, std::size_t stage) {
    double clock = start_of(m, stage);
    const double part_s =
        2 * seconds_[m] / 3 * weights_[stage] / static_cast<double>(num_parts_[m]);
    const bool is_fed = stage + 1 < stages_;  // else its forward, which has ended
    const auto first = at(ends_, first_part_[m]);
    for (auto end = first + num_parts_[m]; end-- != first;) {
      *end = clock = (is_fed ? std::max(clock, *end) : clock) + part_s;
    }
    leave(m, stage, clock);
  }

  double start_of(std::size_t m, std::size_t stage) const {
    double start = 0;
    for (int32_t i = rank_offsets_[m]; i < rank_offsets_[m + 1]; ++i) {
      start = std::max(start, clocks_[stage * num_ranks_ + index(ranks_[index(i)])]);
    }
    return start;
  }

  void leave(std::size_t m, std::size_t stage, double clock) {
    for (int32_t i = rank_offsets_[m]; i < rank_offsets_[m + 1]; ++i) {
      clocks_[stage * num_ranks_ + index(ranks_[index(i)])] = clock;
    }
  }

  std::size_t stages_;
  std::size_t num_ranks_;
  std::vector<double> weights_;
  const std::vector<int32_t>& rank_offsets_;
  const std::vector<int32_t>& ranks_;
  const std::vector<double>& seconds_;
  const std::vector<int32_t>& num_parts_;
  std::vector<double> clocks_;                       // by stage, then rank
  std::vector<std::vector<std::size_t>> positions_;  // their micro-batches
  std::vector<std::size_t> first_part_;              // of each micro-batch, in `ends_`
  std::vector<double> ends_;                         // of each part, where it was last
};

}  // namespace

std::vector<double> pipeline_ends_in_parts(const Problem& problem,
                                           const std::vector<int32_t>& rank_offsets,
                                           const std::vector<int32_t>& ranks,
                                           const std::vector<double>& seconds,
                                           const std::vector<int32_t>& num_parts,
                                           int64_t num_ranks) {
  return Streams(problem, rank_offsets, ranks, seconds, num_parts, num_ranks).run();
}

}  // namespace hdp
