#include "data/epoch_order.hpp"

#include <stdexcept>
#include <string>

namespace hdp {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio, as in SplitMix64

// SplitMix64's finaliser: a permutation of 64 bits in which each bit reaches every other one.
uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

// The round's number below `size` <= 2^24: 40 bits times size fit into 64.
uint64_t round_number(uint64_t half, uint64_t key, uint64_t size) {
  return ((mixed(half ^ key) >> 24) * size) >> 40;
}

uint64_t added(uint64_t half, uint64_t number, uint64_t size) {
  const uint64_t sum = half + number;
  return sum < size ? sum : sum - size;
}

uint64_t ceil_sqrt(uint64_t value) {
  uint64_t below = 0;  // the greatest number whose square is less
  for (uint64_t bit = uint64_t{1} << 24; bit > 0; bit >>= 1) {
    if ((below + bit) * (below + bit) < value) below += bit;
  }
  return below + 1;
}

uint64_t checked(int64_t num_rows) {
  if (num_rows < 1 || num_rows > EpochOrder::kMaxRows) {
    throw std::invalid_argument(
        "an epoch of " + std::to_string(num_rows) +
        " rows, expected 1 to 2^48 = " + std::to_string(EpochOrder::kMaxRows));
  }
  return static_cast<uint64_t>(num_rows);
}

}  // namespace

EpochOrder::EpochOrder(int64_t num_rows, uint64_t seed, uint64_t source, uint64_t epoch)
    : num_rows_(checked(num_rows)), keys_() {
  const uint64_t root = ceil_sqrt(num_rows_);
  left_size_ = root + root % 2;
  right_size_ = (num_rows_ + left_size_ - 1) / left_size_;
  uint64_t state = 0;
  for (const uint64_t word : {seed, source, epoch}) state = mixed((state ^ word) + kGolden);
  for (uint64_t& key : keys_) key = mixed(state += kGolden);  // SplitMix64 from that state on
}

template <std::size_t kCount>
void EpochOrder::permute(std::array<uint64_t, kCount>& left,
                         std::array<uint64_t, kCount>& right) const {
  for (std::size_t i = 0; i < kNumRounds; i += 2) {
    for (std::size_t k = 0; k < kCount; ++k) {
      left[k] = added(left[k], round_number(right[k], keys_[i], left_size_), left_size_);
    }
    for (std::size_t k = 0; k < kCount; ++k) {
      right[k] = added(right[k], round_number(left[k], keys_[i + 1], right_size_), right_size_);
    }
  }
}

template <std::size_t kCount>
void EpochOrder::write_rows(int64_t position, int64_t* rows) const {
  std::array<uint64_t, kCount> left, right;
  for (std::size_t k = 0; k < kCount; ++k) {
    left[k] = (static_cast<uint64_t>(position) + k) / right_size_;
    right[k] = (static_cast<uint64_t>(position) + k) % right_size_;
  }
  permute(left, right);
  for (std::size_t k = 0; k < kCount; ++k) {
    while (left[k] * right_size_ + right[k] >= num_rows_) {
      std::array<uint64_t, 1> one_left{left[k]}, one_right{right[k]};
      permute(one_left, one_right);
      left[k] = one_left[0], right[k] = one_right[0];
    }
    rows[k] = static_cast<int64_t>(left[k] * right_size_ + right[k]);
  }
}

int64_t EpochOrder::row(int64_t position) const {
  int64_t found = 0;
  write_rows<1>(position, &found);
  return found;
}

std::vector<int64_t> EpochOrder::rows(int64_t first, int64_t count) const {
  const auto num_rows = static_cast<int64_t>(num_rows_);
  if (first < 0 || count < 0 || first > num_rows || count > num_rows - first) {
    throw std::invalid_argument(std::to_string(count) + " positions from " + std::to_string(first) +
                                " on, expected some of the epoch's " + std::to_string(num_rows));
  }
  std::vector<int64_t> found(static_cast<std::size_t>(count));
  int64_t done = 0;
  for (; done + kAtOnce <= count; done += kAtOnce) write_rows<kAtOnce>(first + done, &found[done]);
  for (; done < count; ++done) write_rows<1>(first + done, &found[done]);
  return found;
}

}  // namespace hdp
