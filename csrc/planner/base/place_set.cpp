#include "planner/base/place_set.hpp"

namespace hdp {
namespace {

constexpr std::size_t kBits = 64;

std::size_t lowest_bit(uint64_t word) { return static_cast<std::size_t>(__builtin_ctzll(word)); }

}  // namespace

PlaceSet::PlaceSet(std::size_t size) : size_(size) {
  do {
    size = (size + kBits - 1) / kBits;
    levels_.emplace_back(size, 0);
  } while (size > 1);
}

void PlaceSet::insert(std::size_t place) {
  for (auto& words : levels_) {
    words[place / kBits] |= uint64_t{1} << place % kBits;
    place /= kBits;
  }
}

void PlaceSet::erase(std::size_t place) {
  for (auto& words : levels_) {
    words[place / kBits] &= ~(uint64_t{1} << place % kBits);
    if (words[place / kBits] != 0) return;
    place /= kBits;
  }
}

std::size_t PlaceSet::next(std::size_t place) const {
  for (std::size_t level = 0; level < levels_.size(); ++level) {
    if (place / kBits >= levels_[level].size()) return size_;
    const uint64_t later = levels_[level][place / kBits] >> place % kBits;
    if (later != 0) {
      place += lowest_bit(later);
      while (level > 0) {
        --level;
        place = place * kBits + lowest_bit(levels_[level][place]);
      }
      return place;
    }
    place = place / kBits + 1;
  }
  return size_;
}

}  // namespace hdp
