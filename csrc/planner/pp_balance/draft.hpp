// pp-balance: a plan from a few decisions, and a sketch of it that costs a fraction of the time.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/types.hpp"
#include "planner/pp_balance/fill.hpp"
#include "planner/pp_balance/seats.hpp"
#include "planner/pp_balance/slots.hpp"

namespace hdp {

// The decisions besides the rounds.
struct Arrangement {
  Rows rows;
  double own_s = 0;  // about the time of a micro-batch beside no ring
  double part_s = 0;  // that parts of micro-batches should take; 0: all run whole
};

struct Sketch {
  std::vector<double> shares;     // by lane
  double makespan_s = kInfinity;  // if it cannot be filled
  int64_t work = 0;               // operations that were run
};

// The makespan if short sequences were a fluid, on lanes of ranks that are alike. Gives up early on
// one that is far above least_s, that of the best sketch.
Sketch sketch(const Problem& problem, const Seating& seating, const Shorts& shorts,
              const Arrangement& arrangement, double least_s);

struct PipelineDraft {
  Plan plan;
  double makespan_s = kInfinity;
};

// The plan itself; `shares`, by rank, are a sketch's.
PipelineDraft pipeline_draft(const Problem& problem, const Seating& seating, const Shorts& shorts,
                             const Arrangement& arrangement, std::vector<double> shares);

}  // namespace hdp
