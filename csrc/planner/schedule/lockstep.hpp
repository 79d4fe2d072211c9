// The time of a plan whose neighbouring ranks share experts: they wait for each other at every
// position.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/base/types.hpp"
#include "planner/schedule/schedule.hpp"

namespace hdp {

// The position of each micro-batch in the lists of all its ranks: what the plan says, or the first
// one that is free on all of them and behind what they run before.
std::vector<int32_t> aligned_positions(const Problem& problem, const Plan& plan);

// As simulate(), for problem.expert_ranks > 1. At a position a domain takes the time of its slowest
// rank without experts, and on top 1/E of its tokens' time in experts, on its slowest rank. A ring
// over several domains ties their positions: they start together and take the time of the slowest.
// With pipeline stages domains are the pipelines, and each stage takes its part of a position.
Schedule simulate_lockstep(const Problem& problem, const Plan& plan);

// The problem without the time that experts take.
Problem without_experts(const Problem& problem);

}  // namespace hdp
