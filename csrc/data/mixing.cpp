#include "data/mixing.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>

namespace hdp {
namespace {

void check(const std::vector<double>& weights, const std::vector<double>& owed,
           const Ready& ready) {
  const std::size_t count = weights.size();
  if (owed.size() != count || ready.used.size() != count || ready.first.size() != count + 1) {
    throw std::invalid_argument("found " + std::to_string(count) + " weights and figures of " +
                                std::to_string(owed.size()) + " sources; expected as many");
  }
  double sum = 0.0;
  for (std::size_t i = 0; i < count; ++i) {
    if (ready.first[i] < 0 || ready.used[i] < 0 ||
        ready.first[i] + ready.used[i] > ready.first[i + 1]) {
      throw std::invalid_argument("found more sequences drawn of source " + std::to_string(i) +
                                  " than it has ready");
    }
    if (!(weights[i] >= 0.0) || !std::isfinite(weights[i])) {
      throw std::invalid_argument("found the weight " + std::to_string(weights[i]) +
                                  "; expected a number from 0 on");
    }
    if (!std::isfinite(owed[i])) {
      throw std::invalid_argument("found " + std::to_string(owed[i]) + " owed to source " +
                                  std::to_string(i) + "; expected a number");
    }
    sum += weights[i];
  }
  if (!(sum > 0.0)) {
    throw std::invalid_argument("found weights that are all 0; expected one above");
  }
}

// The place in `ready` of the next sequence of a source; -1 where there is none.
int64_t next_of(std::size_t source, const Ready& ready) {
  const int64_t next = ready.first[source] + ready.used[source];
  return next < ready.first[source + 1] ? next : -1;
}

constexpr std::size_t kLanes = 4;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The sources that are drawn from, as columns: what a draw does with all of them, the compiler
// makes vector instructions of. A hundred sources are looked at for each sequence.
class Queues {
 public:
  Queues(const std::vector<double>& weights, const std::vector<double>& owed, Ready& ready)
      : ready_(ready) {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (!(weights[i] > 0.0)) continue;
      sources_.push_back(i);
      weights_.push_back(weights[i]);
      owed_.push_back(owed[i]);
      amounts_.push_back(amount_of_next(i));
    }
    due_.resize((sources_.size() + kLanes - 1) / kLanes * kLanes, kInfinity);
  }

  // The queue whose turn it is.
  std::size_t turn() {
    double first = first_due(0.0);
    double least = 0.0;
    if (first == kInfinity) {  // rounding has left all of them just below 0
      least = std::min(0.0, *std::max_element(owed_.begin(), owed_.end()));
      first = first_due(least);
    }
    std::size_t queue = 0;
    while (due_[queue] != first || owed_[queue] < least) ++queue;
    return queue;
  }

  std::size_t source(std::size_t queue) const { return sources_[queue]; }

  // Takes the next sequence of a queue.
  void take(std::size_t queue) {
    const double amount = amounts_[queue];
    for (std::size_t k = 0; k < owed_.size(); ++k) owed_[k] += weights_[k] * amount;
    owed_[queue] -= amount;
    ++ready_.used[sources_[queue]];
    amounts_[queue] = amount_of_next(sources_[queue]);
  }

  void write_owed(std::vector<double>& owed) const {
    for (std::size_t k = 0; k < sources_.size(); ++k) owed[sources_[k]] = owed_[k];
  }

 private:
  // When the first one falls due of those that are owed `least` or more; the others never do.
  double first_due(double least) {
    const std::size_t count = owed_.size();
    for (std::size_t k = 0; k < count; ++k) due_[k] = (amounts_[k] - owed_[k]) / weights_[k];
    for (std::size_t k = 0; k < count; ++k) due_[k] = owed_[k] >= least ? due_[k] : kInfinity;
    std::array<double, kLanes> first;
    first.fill(kInfinity);
    for (std::size_t k = 0; k < due_.size(); k += kLanes) {
      for (std::size_t j = 0; j < kLanes; ++j) first[j] = std::min(first[j], due_[k + j]);
    }
    return *std::min_element(first.begin(), first.end());
  }

  // Of a source that has nothing ready, what falls due before all else.
  double amount_of_next(std::size_t source) const {
    const int64_t next = next_of(source, ready_);
    return next < 0 ? -kInfinity : static_cast<double>(ready_.amounts[next]);
  }

  Ready& ready_;
  std::vector<std::size_t> sources_;
  std::vector<double> weights_;
  std::vector<double> owed_;
  std::vector<double> amounts_;  // of the next sequences
  std::vector<double> due_;
};

}  // namespace

Mixed mix(const std::vector<double>& weights, std::vector<double>& owed, Ready& ready, Room room) {
  check(weights, owed, ready);
  Queues queues(weights, owed, ready);
  Mixed mixed{{}, {}, -1};
  while (room.sequences > 0) {
    const std::size_t queue = queues.turn();
    const std::size_t source = queues.source(queue);
    const int64_t next = next_of(source, ready);
    if (next < 0) {
      mixed.source = static_cast<int32_t>(source);
      break;
    }
    const int64_t length = ready.lengths[next];
    if (length < 1) {
      throw std::invalid_argument("found a sequence of " + std::to_string(length) +
                                  " tokens; expected at least 1");
    }
    if (length > room.tokens && !room.must_take) {
      break;
    }
    room.tokens -= length;
    room.sequences -= 1;
    room.must_take = false;
    mixed.sources.push_back(static_cast<int32_t>(source));
    mixed.turns.push_back(ready.used[source]);
    queues.take(queue);
  }
  queues.write_owed(owed);
  return mixed;
}

}  // namespace hdp
