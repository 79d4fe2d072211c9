#include "planner/pp_balance/shares.hpp"

#include <algorithm>
#include <limits>

namespace hdp {
namespace {

// Of what would level the ends if nobody waited for anybody: more overshoots.
constexpr double kDamping = 0.7;

// Water of volume total_s over lanes whose ground stands at ground_s, measured in seconds; a lane
// takes its speed x weight for each second of depth.
std::vector<double> pour(const Seating& seating, const std::vector<double>& ground_s,
                         double total_s) {
  constexpr int kSteps = 40;
  double breadth = 0;
  for (std::size_t i = 0; i < ground_s.size(); ++i) {
    breadth += seating.speed[i] * seating.weight[i];
  }
  double low = *std::min_element(ground_s.begin(), ground_s.end());
  double high = *std::max_element(ground_s.begin(), ground_s.end()) + total_s / breadth;
  for (int step = 0; step < kSteps; ++step) {
    const double level = (low + high) / 2;
    double volume = 0;
    for (std::size_t i = 0; i < ground_s.size(); ++i) {
      volume += seating.speed[i] * seating.weight[i] * std::max(0.0, level - ground_s[i]);
    }
    (volume < total_s ? low : high) = level;
  }
  std::vector<double> shares;
  for (std::size_t i = 0; i < ground_s.size(); ++i) {
    shares.push_back(seating.speed[i] * std::max(0.0, high - ground_s[i]));
  }
  return shares;
}

}  // namespace

std::vector<double> first_shares(const Seating& seating, double total_s) {
  return pour(seating, seating.ring_s, total_s);
}

std::vector<double> next_shares(const Seating& seating, const std::vector<double>& had,
                                const std::vector<double>& ends, int64_t stages, double total_s) {
  std::vector<double> ground_s;
  for (std::size_t i = 0; i < had.size(); ++i) {
    ground_s.push_back(kDamping * static_cast<double>(stages) * ends[i] -
                       had[i] / seating.speed[i]);
  }
  return pour(seating, ground_s, total_s);
}

}  // namespace hdp
