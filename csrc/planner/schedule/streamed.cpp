// The 1F1B schedule of micro-batches in parts.
#include <algorithm>

#include "planner/base/stream.hpp"
#include "planner/schedule/schedule.hpp"
#include "planner/schedule/tick_order.hpp"

namespace hdp {
namespace {

// As of whole micro-batches, with the parts of an operation in its place: forward in order, backward in
// reverse. What a part waits for is in an earlier tick, or earlier in its own. Members of a ring have
// one clock while they run it, so it runs once.
class Streams {
 public:
  Streams(const Problem& problem, const std::vector<int32_t>& rank_offsets,
          const std::vector<int32_t>& ranks, const std::vector<double>& seconds, int64_t num_ranks,
          const Passing& passing)
      : order_(problem),
        num_ranks_(index(num_ranks)),
        weights_(weights_of_rows(problem)),
        rank_offsets_(rank_offsets),
        ranks_(ranks),
        seconds_(seconds),
        passing_(passing),
        clocks_(order_.stages() * num_ranks_, 0.0) {
    std::vector<std::size_t> counts(num_ranks_, 0);
    for (std::size_t m = 0; m < seconds.size(); ++m) add(m, counts);
    for (std::size_t rank = 0; rank < num_ranks_; ++rank) {  // padding hands on what came before it
      while (counts[rank] < order_.padded(counts[rank])) {
        ranks_.push_back(static_cast<int32_t>(rank));
        rank_offsets_.push_back(static_cast<int32_t>(ranks_.size()));
        seconds_.push_back(0);
        passing_.num_parts.push_back(1);
        add(seconds_.size() - 1, counts);
      }
    }
  }

  std::vector<double> run() {
    order_.run(
        positions_.size(),
        [&](std::size_t position, std::size_t stage, std::size_t row) {
          for (const std::size_t m : positions_[position]) forward(m, stage, row);
        },
        [&](std::size_t position, std::size_t stage, std::size_t row) {
          for (const std::size_t m : positions_[position]) backward(m, stage, row);
        });
    return {clocks_.begin(), at(clocks_, num_ranks_)};  // the last backward is on the first stage
  }

 private:
  // A micro-batch behind those that its ranks have.
  void add(std::size_t m, std::vector<std::size_t>& counts) {
    first_part_.push_back(ends_.size());
    ends_.resize(ends_.size() + index(passing_.num_parts[m]), 0.0);
    const std::size_t position = counts[index(ranks_[index(rank_offsets_[m])])];
    for (int32_t i = rank_offsets_[m]; i < rank_offsets_[m + 1]; ++i) {
      ++counts[index(ranks_[index(i)])];
    }
    if (position == positions_.size()) positions_.emplace_back();
    positions_[position].push_back(m);
  }

  void forward(std::size_t m, std::size_t stage, std::size_t row) {
    double clock = start_of(m, stage);
    const int64_t num_parts = passing_.num_parts[m];
    const PartTimes part_s(passes_of(m).forward_s * weights_[row], num_parts, passing_.growth_of(m));
    const auto end = at(ends_, first_part_[m]);
    for (int64_t number = 0; number < num_parts; ++number) {
      clock = std::max(clock, end[number]) + part_s.of(number);
      end[number] = clock;
    }
    leave(m, stage, clock);
  }

  void backward(std::size_t m, std::size_t stage, std::size_t row) {
    double clock = start_of(m, stage);
    const int64_t num_parts = passing_.num_parts[m];
    const PartTimes part_s(passes_of(m).backward_s * weights_[row], num_parts, passing_.growth_of(m));
    const bool is_fed = row + 1 < order_.rows();  // else its forward, which has ended
    const auto end = at(ends_, first_part_[m]);
    for (int64_t number = num_parts; number-- > 0;) {
      clock = (is_fed ? std::max(clock, end[number]) : clock) + part_s.of(number);
      end[number] = clock;
    }
    leave(m, stage, clock);
  }

  PassTimes passes_of(std::size_t m) const {
    return {seconds_[m], passing_.is_twice(m)};
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

  TickOrder order_;
  std::size_t num_ranks_;
  std::vector<double> weights_;  // by row
  std::vector<int32_t> rank_offsets_;
  std::vector<int32_t> ranks_;
  std::vector<double> seconds_;
  Passing passing_;
  std::vector<double> clocks_;                       // by stage, then rank
  std::vector<std::vector<std::size_t>> positions_;  // their micro-batches
  std::vector<std::size_t> first_part_;              // of each micro-batch, in `ends_`
  std::vector<double> ends_;                         // of each part, where it was last
};

}  // namespace

std::vector<double> streamed_ends(const Problem& problem, const std::vector<int32_t>& rank_offsets,
                                  const std::vector<int32_t>& ranks,
                                  const std::vector<double>& seconds, int64_t num_ranks,
                                  const Passing& passing) {
  return Streams(problem, rank_offsets, ranks, seconds, num_ranks, passing).run();
}

Passing passing_of(const Problem& problem, const Plan& plan) {
  Passing passing{plan.num_parts, plan.recomputed, {}};
  if (plan.stream_parts.empty()) return passing;
  const std::size_t num = index(plan.num_micro_batches());
  passing.num_parts.clear();
  passing.twice.resize(num, false);
  passing.growth.assign(num, 0.0);
  for (std::size_t m = 0; m < num; ++m) {
    const auto number = static_cast<int64_t>(m);
    passing.num_parts.push_back(static_cast<int32_t>(plan.parts(number)));
    if (plan.parts_of_stream(number) == 0) continue;
    passing.twice[m] = true;
    const SequenceId id = *plan.sharded(number).begin();
    passing.growth[m] = growth_of_stream(problem, problem.lengths[index(id)]);
  }
  return passing;
}

}  // namespace hdp
