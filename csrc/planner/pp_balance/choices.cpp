#include "planner/pp_balance/choices.hpp"

#include <algorithm>
#include <array>
#include <tuple>

namespace hdp {
namespace {

// The most promising ones first, here and below: large problems try fewer.
constexpr std::array<Unit, 6> kUnits{
    {{1, kInfinity}, {0.25, 0.25}, {1, 0.5}, {0.5, 0.5}, {0.125, 0.125}, {0.0625, 0.0625}}};

constexpr std::array<Deal, 15> kDeals{{{0.5, 0.6},
                                       {0.5, 0.0},
                                       {0.5, 0.8},
                                       {2.0, 0.4},
                                       {0.5, 0.4},
                                       {1.0, 0.0},
                                       {3.0, 0.0},
                                       {0.5, 0.4, 1.5},
                                       {1.0, 0.0, 1.0},
                                       {2.0, 0.0, 1.0},
                                       {4.0, 0.0, 1.0},
                                       {8.0, 0.0, 1.0},
                                       {4.0, 0.0},
                                       {6.0, 0.0},
                                       {8.0, 0.0}}};

}  // namespace

bool Choice::operator==(const Choice& other) const {
  return std::tie(unit, deal, profile, own_rows, groups) ==
         std::tie(other.unit, other.deal, other.profile, other.own_rows, other.groups);
}

const Unit& unit_of(const Choice& choice) { return kUnits[choice.unit]; }

const Deal& deal_of(const Choice& choice) { return kDeals[choice.deal]; }

std::vector<Choice> first_choices(int64_t group) {
  std::vector<Choice> result;
  for (std::size_t unit = 0; unit < kUnits.size(); ++unit) {
    result.push_back({unit, 0, Profile::kRising, 1, false});
    if (group > 1) result.push_back({unit, 0, Profile::kRising, 1, true});
  }
  return result;
}

std::vector<Choice> other_deals(const Choice& from) {
  std::vector<Choice> result;
  for (std::size_t deal = 0; deal < kDeals.size(); ++deal) {
    result.push_back({from.unit, deal, from.profile, from.own_rows, from.groups});
  }
  return result;
}

std::vector<Choice> other_orders(const Choice& from, int64_t group) {
  std::vector<Choice> result;
  for (const Profile profile : {Profile::kRising, Profile::kBefore, Profile::kBehind}) {
    for (int64_t own_rows = 0; own_rows < std::max<int64_t>(4, group); ++own_rows) {
      result.push_back({from.unit, from.deal, profile, own_rows, from.groups});
    }
  }
  return result;
}

Rows rows_of(const Choice& choice, std::size_t num_rounds, int64_t group) {
  Rows rows(index(choice.own_rows), kNoRound);
  Rows behind;
  for (auto round = static_cast<int64_t>(num_rounds) - 1; round >= 0; --round) {
    const int64_t place = round / group;
    const bool is_odd = place % 2 == 1;
    const bool goes_behind = (choice.profile == Profile::kBefore && !is_odd && place > 0) ||
                             (choice.profile == Profile::kBehind && is_odd);
    (goes_behind ? behind : rows).push_back(round);
  }
  rows.insert(rows.end(), behind.rbegin(), behind.rend());
  return rows;
}

}  // namespace hdp
