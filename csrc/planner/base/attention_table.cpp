#include "planner/base/attention_table.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace hdp {
namespace {

// Equal seconds per token that were multiplied and divided differ by less.
constexpr double kRounding = 1e-12;

constexpr int kBucketBits = 4;
constexpr int64_t kBucketsOfAPower = int64_t{1} << kBucketBits;
constexpr int64_t kNumBuckets = 42 * kBucketsOfAPower;  // of lengths up to 2^42

// The bucket of a length: exponent and leading digits of a double, which are next to each other.
std::size_t bucket_of(int64_t length) {
  constexpr int kOtherBits = 52 - kBucketBits;
  constexpr int64_t kOfOne = int64_t{1023} << kBucketBits;
  const auto number = static_cast<double>(std::max<int64_t>(1, length));
  int64_t bits = 0;
  static_assert(sizeof bits == sizeof number && std::numeric_limits<double>::is_iec559);
  std::memcpy(&bits, &number, sizeof bits);
  return static_cast<std::size_t>(std::min((bits >> kOtherBits) - kOfOne, kNumBuckets - 1));
}

// The least length that a bucket may have.
int64_t least_of(int64_t bucket) {
  const int64_t digits = kBucketsOfAPower + bucket % kBucketsOfAPower;
  const double least = std::ldexp(static_cast<double>(digits),
                                  static_cast<int>(bucket / kBucketsOfAPower) - kBucketBits);
  return static_cast<int64_t>(std::ceil(least));
}

// The last of the lines from `first` to `last` that starts at `length` or before; else `first`.
std::size_t last_start(const std::vector<int64_t>& starts, std::size_t first, std::size_t last,
                       int64_t length) {
  const auto begin = starts.begin() + static_cast<std::ptrdiff_t>(first);
  const auto end = starts.begin() + static_cast<std::ptrdiff_t>(last);
  return static_cast<std::size_t>(std::upper_bound(begin + 1, end + 1, length) - starts.begin()) -
         1;
}

}  // namespace

AttentionTable::AttentionTable(std::vector<AttentionPoint> points) : points_(std::move(points)) {
  if (points_.empty()) return;
  AttentionPoint start;
  double most_per_token = 0;
  for (const AttentionPoint& point : points_) {
    const auto tokens = static_cast<double>(point.length);
    const double slope =
        (point.seconds - start.seconds) / (tokens - static_cast<double>(start.length));
    starts_.push_back(start.length);
    lines_.push_back({start.seconds, slope, point.seconds, most_per_token});
    const double per_token = point.seconds / tokens;
    if (per_token < most_per_token * (1 - kRounding)) rises_per_token_ = false;
    most_per_token = std::max(most_per_token, per_token);
    start = point;
  }
  constexpr double kNoLimit = std::numeric_limits<double>::infinity();
  starts_.push_back(start.length);
  lines_.push_back({start.seconds, lines_.back().slope, kNoLimit, most_per_token});
  for (int64_t bucket = 0; bucket < kNumBuckets; ++bucket) {
    first_lines_.push_back(last_start(starts_, 0, starts_.size() - 1, least_of(bucket)));
  }
  first_lines_.push_back(starts_.size() - 1);
}

std::size_t AttentionTable::line_of(int64_t length) const {
  const std::size_t bucket = bucket_of(length);
  const std::size_t first = length < 1 ? 0 : first_lines_[bucket];
  return last_start(starts_, first, first_lines_[bucket + 1], length);
}

double AttentionTable::seconds(int64_t length) const {
  const std::size_t i = line_of(length);
  const Line& line = lines_[i];
  const auto tokens = static_cast<double>(length - starts_[i]);
  return std::min(line.limit, line.seconds + line.slope * tokens);
}

double AttentionTable::most_per_token(int64_t longest) const {
  const double there = seconds(longest) / static_cast<double>(longest);
  return std::max(lines_[line_of(longest)].most_per_token, there);
}

}  // namespace hdp
