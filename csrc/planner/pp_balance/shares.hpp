// pp-balance: how many seconds of short sequences each lane gets, corrected until all lanes end
// together.
#pragma once

#include <vector>

#include "planner/pp_balance/seats.hpp"

namespace hdp {

// Shares, at speed 1, that sum to total_s over all ranks and level the time of rings and shorts.
std::vector<double> first_shares(const Seating& seating, double total_s);

// Shares that move from lanes that end late to those that end early, where `had` was each one's
// share. On a stage of a pipeline a second more takes 1 / stages of a second.
std::vector<double> next_shares(const Seating& seating, const std::vector<double>& had,
                                const std::vector<double>& ends, int64_t stages, double total_s);

}  // namespace hdp
