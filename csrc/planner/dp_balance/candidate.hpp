// Decisions with the rings and the time that follow from them: what the search compares.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "planner/rings/batch.hpp"
#include "planner/rings/rings.hpp"

namespace hdp {

// A cost model does not tell apart what differs by less, whereas ring traffic costs energy and
// other jobs' bandwidth even where it is hidden: of plans nearly as fast as the fastest the leanest
// serves.
constexpr double kNearlyAsFast = 1.002;

// What a draft will take once the short sequences have levelled the ranks, without placing them.
struct Level {
  double makespan_s = 0;
  double excess_s = 0;  // rank-seconds above the level: a measure of how much is in the way
  int32_t latest_rank = 0;
  std::vector<std::size_t> singles;  // places of the big sequences of degree 1 on that rank
};

// The big sequences of degree 1 are given to the ranks that are free first; the others fill up.
Level estimate(const Batch& batch, const Decisions& decisions, const RingSchedule& schedule);

struct Candidate {
  Candidate(const Batch& batch, Decisions decisions);

  Decisions decisions;
  RingSchedule rings;
  Level level;
};

using DegreeRuns = std::vector<std::pair<int32_t, std::size_t>>;  // (degree, how often)

// A candidate that waits for its turn. One of many rings is made again then: a large batch has no
// room for those of all.
struct Start {
  Decisions decisions;  // without degrees
  DegreeRuns degrees;
  double makespan_s = 0;
  std::optional<Candidate> candidate;  // if it has few rings
};

// With the degrees.
Decisions decisions_of(const Start& start);

// The candidate, which the start no longer has then.
Candidate take_candidate(const Batch& batch, Start& start);

// Where a search may begin, the most promising first: the leanest in traffic of those that are
// nearly as fast as the fastest, then the others by time. One that is fast enough comes alone.
std::vector<Start> first_starts(const Batch& batch, double enough_s);

}  // namespace hdp
