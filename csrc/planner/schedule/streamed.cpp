// The 1F1B schedule of micro-batches in parts.
#include <algorithm>

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
          const std::vector<int32_t>& num_parts, const std::vector<bool>& recomputed)
      : order_(problem),
        num_ranks_(index(num_ranks)),
        weights_(weights_of_rows(problem)),
        rank_offsets_(rank_offsets),
        ranks_(ranks),
        seconds_(seconds),
        num_parts_(num_parts),
        recomputed_(recomputed),
        clocks_(order_.stages() * num_ranks_, 0.0) {
    std::vector<std::size_t> counts(num_ranks_, 0);
    for (std::size_t m = 0; m < seconds.size(); ++m) add(m, counts);
    for (std::size_t rank = 0; rank < num_ranks_; ++rank) {  // padding hands on what came before it
      while (counts[rank] < order_.padded(counts[rank])) {
        ranks_.push_back(static_cast<int32_t>(rank));
        rank_offsets_.push_back(static_cast<int32_t>(ranks_.size()));
        seconds_.push_back(0);
        num_parts_.push_back(1);
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
    ends_.resize(ends_.size() + index(num_parts_[m]), 0.0);
    const std::size_t position = counts[index(ranks_[index(rank_offsets_[m])])];
    for (int32_t i = rank_offsets_[m]; i < rank_offsets_[m + 1]; ++i) {
      ++counts[index(ranks_[index(i)])];
    }
    if (position == positions_.size()) positions_.emplace_back();
    positions_[position].push_back(m);
  }

  void forward(std::size_t m, std::size_t stage, std::size_t row) {
    double clock = start_of(m, stage);
    const double part_s =
        passes_of(m).forward_s * weights_[row] / static_cast<double>(num_parts_[m]);
    const auto first = at(ends_, first_part_[m]);
    for (auto end = first; end != first + num_parts_[m]; ++end) {
      *end = clock = std::max(clock, *end) + part_s;
    }
    leave(m, stage, clock);
  }

  void backward(std::size_t m, std::size_t stage, std::size_t row) {
    double clock = start_of(m, stage);
    const double part_s =
        passes_of(m).backward_s * weights_[row] / static_cast<double>(num_parts_[m]);
    const bool is_fed = row + 1 < order_.rows();  // else its forward, which has ended
    const auto first = at(ends_, first_part_[m]);
    for (auto end = first + num_parts_[m]; end-- != first;) {
      *end = clock = (is_fed ? std::max(clock, *end) : clock) + part_s;
    }
    leave(m, stage, clock);
  }

  PassTimes passes_of(std::size_t m) const {
    return {seconds_[m], m < recomputed_.size() && recomputed_[m]};
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
  std::vector<int32_t> num_parts_;
  std::vector<bool> recomputed_;
  std::vector<double> clocks_;                       // by stage, then rank
  std::vector<std::vector<std::size_t>> positions_;  // their micro-batches
  std::vector<std::size_t> first_part_;              // of each micro-batch, in `ends_`
  std::vector<double> ends_;                         // of each part, where it was last
};

}  // namespace

std::vector<double> streamed_ends(const Problem& problem, const std::vector<int32_t>& rank_offsets,
                                  const std::vector<int32_t>& ranks,
                                  const std::vector<double>& seconds, int64_t num_ranks,
                                  const std::vector<int32_t>& num_parts,
                                  const std::vector<bool>& recomputed) {
  return Streams(problem, rank_offsets, ranks, seconds, num_ranks, num_parts, recomputed).run();
}

}  // namespace hdp
