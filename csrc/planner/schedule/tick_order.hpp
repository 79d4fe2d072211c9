// The order in which stages run micro-batches: a clock that no wait points forward on.
#pragma once

#include <cstddef>

#include "planner/base/types.hpp"
#include "planner/schedule/schedule.hpp"

namespace hdp {

// Operations tick by tick. Micro-batches pass in groups through one chunk after the other; passes
// through a chunk are counted, backward from the last chunk to the first. Stage s runs forward i in
// tick i + s and backward j, which comes behind forward j + w(s), in tick j + w(s) + s: forwards
// first, then backwards from the last stage to the first. So what an operation waits for is in an
// earlier tick or earlier in its own.
class TickOrder {
 public:
  explicit TickOrder(const Problem& problem)
      : stages_(index(problem.pipeline_stages)),
        chunks_(index(problem.model_chunks)),
        group_(index(group_size(problem))) {}

  std::size_t stages() const { return stages_; }
  std::size_t rows() const { return stages_ * chunks_; }

  // Positions of so many micro-batches, with padding.
  std::size_t padded(std::size_t count) const { return (count + group_ - 1) / group_ * group_; }

  // Calls forward(position, stage, row) and backward(position, stage, row) for so many positions, a
  // multiple of a group; row c P + s is chunk c of stage s.
  template <typename Forward, typename Backward>
  void run(std::size_t num_positions, const Forward& forward, const Backward& backward) const {
    const std::size_t passes = chunks_ * num_positions;
    const std::size_t ticks = passes == 0 ? 0 : passes + warm_up(0);
    for (std::size_t tick = 0; tick < ticks; ++tick) {
      for (std::size_t stage = 0; stage < stages_ && stage <= tick; ++stage) {
        const std::size_t i = tick - stage;
        if (i < passes) forward(position(i), stage, turn(i) * stages_ + stage);
      }
      for (std::size_t stage = stages_; stage-- > 0;) {
        const std::size_t first = warm_up(stage) + stage;
        if (tick < first || tick - first >= passes) continue;
        const std::size_t j = tick - first;
        backward(position(j), stage, (chunks_ - 1 - turn(j)) * stages_ + stage);
      }
    }
  }

 private:
  std::size_t warm_up(std::size_t stage) const {
    const std::size_t behind = stages_ - 1 - stage;
    return chunks_ == 1 ? behind : 2 * behind + (chunks_ - 1) * stages_;
  }

  std::size_t position(std::size_t pass) const {
    return pass / (group_ * chunks_) * group_ + pass % group_;
  }

  // Of its group: the chunk, backward counted from the last one.
  std::size_t turn(std::size_t pass) const { return pass % (group_ * chunks_) / group_; }

  std::size_t stages_;
  std::size_t chunks_;
  std::size_t group_;
};

}  // namespace hdp
