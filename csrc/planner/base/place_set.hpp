// Places of a batch, a bit each: which ones are left, and which is the next of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hdp {

class PlaceSet {
 public:
  // No place of `size` many.
  explicit PlaceSet(std::size_t size = 0);

  static PlaceSet all(std::size_t size) {
    PlaceSet places(size);
    for (std::size_t place = 0; place < size; ++place) places.insert(place);
    return places;
  }

  void insert(std::size_t place);
  void erase(std::size_t place);

  // The first place in the set that is not before the given one; size() if there is none.
  std::size_t next(std::size_t place) const;

  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  // Bits of the places, then a bit for each word of the level below that has any.
  std::vector<std::vector<uint64_t>> levels_;
};

}  // namespace hdp
