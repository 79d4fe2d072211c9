// The way into ep-balance.
#pragma once

#include "planner/base/types.hpp"

namespace hdp {

// Plans for ranks that share experts by domains of expert_ranks neighbours, which wait for each
// other at every position. Two levels: dp-balance with a domain in the place of a rank decides
// which domains run what and which sequences get rings over several domains; then what one domain
// runs between two such rings is dealt into positions (Rows). With one rank a domain it is
// dp-balance. With pipeline stages it is pp-balance, which deals alike times side by side and
// judges its candidates in lockstep. The plan has positions.
Plan ep_balance(const Problem& problem);

}  // namespace hdp
