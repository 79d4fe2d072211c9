// dp-balance: improves a draft by changing the degree of one sequence at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/draft.hpp"
#include "planner/types.hpp"

namespace hdp {

// Both try a number of drafts that falls with the size of the problem, never until a clock says
// so: every rank must find the same plan. `order` holds all sequence ids, longest first.

// Shortens the makespan until it is at most `enough_s`.
void speed_up(const Problem& problem, const std::vector<int64_t>& order, double enough_s,
              Draft& draft);

// Lowers degrees, and with them ring traffic, as far as the makespan stays within `limit_s`.
void save_traffic(const Problem& problem, const std::vector<int64_t>& order, double limit_s,
                  Draft& draft);

}  // namespace hdp
