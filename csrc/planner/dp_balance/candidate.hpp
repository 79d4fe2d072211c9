// Decisions with the rings and the time that follow from them: what the search compares.
#pragma once

#include <vector>

#include "planner/dp_balance/levels.hpp"
#include "planner/rings/batch.hpp"
#include "planner/rings/rings.hpp"

namespace hdp {

// A cost model does not tell apart what differs by less, whereas ring traffic costs energy and
// other jobs' bandwidth even where it is hidden: of plans nearly as fast as the fastest the leanest
// serves.
constexpr double kNearlyAsFast = 1.002;

struct Candidate {
  Candidate(const Batch& batch, Decisions decisions);

  Decisions decisions;
  RingSchedule rings;
  Level level;
};

// Where a search may begin, the most promising first: the leanest in traffic of those that are
// nearly as fast as the fastest, then the others by time.
std::vector<Candidate> first_candidates(const Batch& batch, double enough_s);

}  // namespace hdp
