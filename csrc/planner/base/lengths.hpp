// The lengths of a global batch, kept once however many problems and threads look at them.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

namespace hdp {

// Read-only; copies share the values.
class Lengths {
 public:
  Lengths() = default;
  Lengths(std::vector<int64_t> values) {
    const auto kept = std::make_shared<const std::vector<int64_t>>(std::move(values));
    *this = Lengths(kept->data(), kept->size(), kept);
  }
  Lengths(std::initializer_list<int64_t> values) : Lengths(std::vector<int64_t>(values)) {}

  // Values that `owner` keeps in place and unchanged.
  Lengths(const int64_t* values, std::size_t size, std::shared_ptr<const void> owner)
      : values_(values), size_(size), owner_(std::move(owner)) {}

  const int64_t* begin() const { return values_; }
  const int64_t* end() const { return values_ + size_; }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  int64_t operator[](std::size_t sequence) const { return values_[sequence]; }

 private:
  const int64_t* values_ = nullptr;
  std::size_t size_ = 0;
  std::shared_ptr<const void> owner_;
};

}  // namespace hdp
