#include "planner/pp_balance/slots.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "planner/schedule/schedule.hpp"

namespace hdp {
namespace {

// Part of what others get that a slot before rings gets at least.
constexpr double kLeast = 0.25;

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

// The level up to which so much fills vessels with these grounds, ascending, and so many more that
// are empty.
double level_of(const std::vector<double>& grounds, std::size_t empty, double volume) {
  double level = volume / static_cast<double>(std::max<std::size_t>(empty, 1));
  for (const double ground : grounds) {
    if (empty > 0 && level <= ground) break;
    volume += ground;
    level = volume / static_cast<double>(++empty);
  }
  return level;
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

OwnSlots::OwnSlots(const Problem& problem, const Seating& seating, const Shorts& shorts,
                   const Rows& rows, double unit_s)
    : shorts_(shorts), group_(index(group_size(problem))), unit_s_(unit_s), speed_(seating.speed) {
  for (std::size_t lane = 0; lane < speed_.size(); ++lane) {
    lanes_.push_back(lane_of(seating, rows, lane));
    for (const Slot& slot : lanes_.back().slots) {
      if (slot.is_needed && slot.base == kNoPlace) num_needed_ += seating.weight[lane];
    }
  }
}

OwnSlots::Lane OwnSlots::lane_of(const Seating& seating, const Rows& rows, std::size_t at) const {
  const std::size_t num_rows = (rows.size() + group_ - 1) / group_ * group_;
  std::vector<const SeatedRing*> rings(num_rows, nullptr);
  std::size_t last_ring = 0;  // the row behind it
  std::size_t last = 0;       // the same of whatever has a row
  std::size_t longest = 0;
  for (std::size_t row = 0; row < rows.size(); ++row) {
    if (rows[row] == kNoRound) continue;
    const std::size_t ring = seating.rounds[index(rows[row])][at];
    if (ring == kNoRing) continue;
    rings[row] = &seating.rings[ring];
    last = row + 1;
    if (!rings[row]->alone) last_ring = row + 1;
    if (rings[longest] == nullptr || rings[row]->seconds > rings[longest]->seconds) longest = row;
  }
  Lane lane;
  for (std::size_t row = 0; row < (last + group_ - 1) / group_ * group_; ++row) {
    double in_group_s = 0;
    for (std::size_t i = row / group_ * group_; i < row / group_ * group_ + group_; ++i) {
      if (rings[i] != nullptr && !rings[i]->alone) {
        in_group_s = std::max(in_group_s, rings[i]->seconds * speed_[at]);
      }
    }
    if (rings[row] != nullptr && !rings[row]->alone) continue;
    Slot slot;
    if (rings[row] != nullptr) {
      slot.base = rings[row]->place;
      slot.base_s = rings[row]->seconds * speed_[at];
    }
    slot.is_needed = row < last_ring;
    if (in_group_s > 0) {
      slot.wanted_s = std::max(slot.base_s, std::min(in_group_s, shorts_.full_bin_s()));
      lane.beside_s += slot.wanted_s - slot.base_s;
    } else {
      lane.bases_s.push_back(slot.base_s);
    }
    lane.before_longest += row < longest;
    lane.slots.push_back(slot);
  }
  std::sort(lane.bases_s.begin(), lane.bases_s.end());
  return lane;
}

OwnSlots::Levels OwnSlots::levels(const Lane& lane, std::size_t at, double share_s) const {
  const double bin_s = shorts_.bin_s(unit_s_ * speed_[at]);
  double least_s = 0;  // of the slots in no group of rings
  double room_s = 0;
  for (const double base_s : lane.bases_s) {
    least_s += std::max(0.0, kLeast * bin_s - base_s);
    room_s += std::max(0.0, bin_s - base_s);
  }
  Levels result;
  if (share_s < lane.beside_s + least_s) result.beside = share_s / (lane.beside_s + least_s);
  const double free_s = share_s - result.beside * lane.beside_s;
  result.more = static_cast<std::size_t>(num_more(free_s - room_s, bin_s));
  if (lane.bases_s.empty() && result.more == 0 && free_s > 0) result.more = group_;
  result.level_s = level_of(lane.bases_s, result.more, free_s);
  return result;
}

std::vector<Slot> OwnSlots::of(std::size_t at, double share_s) const {
  const Lane& lane = lanes_[at];
  const Levels levels = this->levels(lane, at, share_s);
  std::vector<Slot> slots = lane.slots;
  slots.resize(slots.size() + levels.more);
  for (std::size_t i = 0; i < slots.size(); ++i) {
    slots[i].distance = std::abs(2 * (static_cast<int64_t>(i) - lane.before_longest) + 1);
    slots[i].wanted_s = levels.wanted_s(slots[i]);
  }
  return slots;
}

void OwnSlots::add_wanted_s(std::size_t at, double share_s, std::vector<double>& wanted_s) const {
  const Lane& lane = lanes_[at];
  const Levels levels = this->levels(lane, at, share_s);
  for (const Slot& slot : lane.slots) wanted_s.push_back(levels.wanted_s(slot));
  wanted_s.resize(wanted_s.size() + levels.more, levels.wanted_s({}));
}

// Slots behind the last ring for what found no room before.
double OwnSlots::num_more(double free_s, double bin_s) const {
  constexpr double kRounding = 1e-9;
  if (bin_s <= 0 || free_s <= kRounding * bin_s) return 0;
  const auto group = static_cast<double>(group_);
  const double most = static_cast<double>(shorts_.size());
  return std::ceil(std::min(most, std::ceil(free_s / bin_s - kRounding)) / group) * group;
}

}  // namespace hdp
