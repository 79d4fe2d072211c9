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

// The problem whose ranks are the domains, planned by dp-balance: capacity and speed of all of its
// ranks. g is not counted: domains fill their positions afterwards.
DomainPlan plan_domains(const Problem& problem);

}  // namespace hdp
