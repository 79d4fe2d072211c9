#include "planner/packing.hpp"

namespace hdp {

int64_t BestFit::place(int64_t tokens) {
  const auto found = open_.lower_bound({tokens, -1});
  int64_t room = capacity_;
  int64_t bin = num_bins_;
  if (found == open_.end()) {
    ++num_bins_;
  } else {
    room = found->first;
    bin = found->second;
    open_.erase(found);
  }
  if (room > tokens) open_.emplace(room - tokens, bin);
  return bin;
}

}  // namespace hdp
