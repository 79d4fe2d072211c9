// ep-balance: the sequences that one domain runs, dealt into positions.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/ep_balance/cells.hpp"

namespace hdp {

// What the ranks of a domain run at one position.
using Row = std::vector<Cell>;

// All of them, on ranks `first` to `first` + `size` - 1; each fits on all of these together. Rows
// differ in time, the cells of a row do not: so time is lost only in the last cells' last gaps,
// which the shortest sequences fill. `dense`: the problem without experts' time.
std::vector<Row> deal_rows(const Problem& dense, const Items& items, int32_t first, int64_t size);

}  // namespace hdp
