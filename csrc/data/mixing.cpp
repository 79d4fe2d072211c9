#include "data/mixing.hpp"

#include <algorithm>
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

struct Turn {
  std::size_t source;
  int64_t next;  // -1: the source may be next, but has nothing ready
};

Turn turn_of(const std::vector<std::size_t>& active, const std::vector<double>& weights,
             const std::vector<double>& owed, const Ready& ready) {
  double most = -std::numeric_limits<double>::infinity();
  for (const std::size_t i : active) {
    most = std::max(most, owed[i]);
  }
  const double least = std::min(0.0, most);  // rounding may leave all of them just below 0
  Turn turn{active.front(), -1};
  double first_due = std::numeric_limits<double>::infinity();
  for (const std::size_t i : active) {
    if (owed[i] < least) {
      continue;
    }
    const int64_t next = next_of(i, ready);
    if (next < 0) {
      return {i, -1};
    }
    const double due = (static_cast<double>(ready.amounts[next]) - owed[i]) / weights[i];
    if (turn.next < 0 || due < first_due) {
      turn = {i, next};
      first_due = due;
    }
  }
  return turn;
}

}  // namespace

Mixed mix(const std::vector<double>& weights, std::vector<double>& owed, Ready& ready, Room room) {
  check(weights, owed, ready);
  std::vector<std::size_t> active;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] > 0.0) {
      active.push_back(i);
    }
  }
  Mixed mixed{{}, -1};
  while (room.sequences > 0) {
    const Turn turn = turn_of(active, weights, owed, ready);
    if (turn.next < 0) {
      mixed.source = static_cast<int32_t>(turn.source);
      break;
    }
    const int64_t length = ready.lengths[turn.next];
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
    const auto amount = static_cast<double>(ready.amounts[turn.next]);
    for (const std::size_t i : active) {
      owed[i] += weights[i] * amount;
    }
    owed[turn.source] -= amount;
    ++ready.used[turn.source];
    mixed.sources.push_back(static_cast<int32_t>(turn.source));
  }
  return mixed;
}

}  // namespace hdp
