// ep-balance: domains in the place of ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/types.hpp"

namespace hdp {

// What domains run, and which of it comes behind what.
struct DomainPlan {
  // A ring over several domains, or else what one of them runs up to its next such ring: whole
  // sequences, longest first.
  struct Part {
    std::vector<int32_t> domains;
    std::vector<SequenceId> sequences;
  };
  std::vector<Part> parts;           // in launch order
  std::vector<SequenceId> too_long;  // that fit on no ring of whole domains without offload
};

// The problem whose ranks are the domains, as dp-balance drafts it: capacity and speed of all of
// their ranks. g is not counted: domains fill their positions afterwards. So other drafts, which
// differ in what micro-batches cost, and other strategies' plans are not worth their time.
DomainPlan plan_domains(const Problem& problem);

}  // namespace hdp
