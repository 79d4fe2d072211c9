#include "planner/round_balance/blocks.hpp"

#include <algorithm>

namespace hdp {
namespace {

std::size_t depth_of(std::size_t block) {
  std::size_t depth = 0;
  while (block >>= 1) ++depth;
  return depth;
}

}  // namespace

Blocks::Blocks(int64_t num_ranks) : num_ranks_(num_ranks) {
  while (num_leaves_ < index(num_ranks)) {
    num_leaves_ *= 2;
    ++depth_;
  }
  offsets_.resize(2 * num_leaves_);
  std::size_t size = 0;
  for (std::size_t block = 1; block < 2 * num_leaves_; ++block) {
    offsets_[block] = size;
    size += depth_ - depth_of(block) + 1;
  }
  least_.resize(size);
  own_s_.resize(2 * num_leaves_);
  for (std::size_t block = 2 * num_leaves_ - 1; block > 0; --block) update(block);
}

int64_t Blocks::degree(std::size_t block) const {
  return static_cast<int64_t>(num_leaves_ >> depth_of(block));
}

int32_t Blocks::first_rank(std::size_t block) const {
  const std::size_t depth = depth_of(block);
  return static_cast<int32_t>((block << (depth_ - depth)) - num_leaves_);
}

double Blocks::end_s(std::size_t block) const {
  double seconds = least_[entry(block, 0)];
  while (block >>= 1) seconds += own_s_[block];
  return seconds;
}

std::size_t Blocks::earliest(int64_t degree) const {
  std::size_t block = 1;
  for (std::size_t below = depth_ - depth_of(index(degree)); below > 0; --below) {
    const std::size_t left = 2 * block;
    const bool is_later = least_[entry(left, below - 1)] > least_[entry(left + 1, below - 1)];
    block = is_later ? left + 1 : left;
  }
  return block;
}

void Blocks::add(std::size_t block, double seconds) {
  own_s_[block] += seconds;
  for (; block > 0; block /= 2) update(block);
}

void Blocks::update(std::size_t block) {
  const double own_s = own_s_[block];
  if (block >= num_leaves_) {
    least_[entry(block, 0)] = is_whole(block) ? own_s : kInfinity;
    return;
  }
  const std::size_t left = offsets_[2 * block];
  const std::size_t right = offsets_[2 * block + 1];
  double* const least = &least_[offsets_[block]];
  least[0] = own_s + std::max(least_[left], least_[right]);
  for (std::size_t below = 0; below < depth_ - depth_of(block); ++below) {
    least[below + 1] = own_s + std::min(least_[left + below], least_[right + below]);
  }
}

}  // namespace hdp
