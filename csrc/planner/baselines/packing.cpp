#include "planner/baselines/packing.hpp"

namespace hdp {

int64_t BestFit::place(int64_t tokens) {
  const auto found = open_.lower_bound({tokens, -1});
  if (found == open_.end()) {
    if (capacity_ > tokens) open_.emplace(capacity_ - tokens, num_bins_);
    return num_bins_++;
  }
  auto entry = open_.extract(found);
  const int64_t bin = entry.value().second;
  entry.value().first -= tokens;
  if (entry.value().first > 0) open_.insert(std::move(entry));
  return bin;
}

}  // namespace hdp
