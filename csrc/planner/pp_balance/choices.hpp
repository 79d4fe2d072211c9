// pp-balance: what there is to choose, and in which order it is tried.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/pp_balance/slots.hpp"

namespace hdp {

// The time that micro-batches should have.
struct Unit {
  double size = 1;          // in units of a micro-batch of one sequence that fills a rank
  double most = kInfinity;  // of these; longer ones join rounds
};

// How the long sequences are dealt into rounds; times in the choice's unit, except `most`: in units
// of a rank's mean time.
struct Deal {
  double level = 1;         // of a round, if degrees allow it
  double grade = 0;         // part of the round before that a round takes at least
  double most = kInfinity;  // with so much to do: no more rings
};

// Where the longest rounds stand: at the end, or in the middle with the next ones before or behind
// them.
enum class Profile { kRising, kBefore, kBehind };

struct Choice {
  std::size_t unit = 0;  // index into the units
  std::size_t deal = 0;  // index into the deals, or kOnAll
  Profile profile = Profile::kRising;
  int64_t own_rows = 1;  // rows without rings before the others
  bool groups = false;   // rounds of a group have alike times, if degrees allow it

  bool operator==(const Choice& other) const;
};

// In place of a deal: every sequence on all ranks.
constexpr std::size_t kOnAll = index(-1);

const Unit& unit_of(const Choice& choice);
const Deal& deal_of(const Choice& choice);

// One for each unit, with groups and without if there are groups.
std::vector<Choice> first_choices(int64_t group);

// Those that differ from one in how rounds are dealt.
std::vector<Choice> other_deals(const Choice& from);

// Those that differ from one in the order of rows.
std::vector<Choice> other_orders(const Choice& from, int64_t group);

// The rows of a choice. Rounds come with the longest first; groups of so many stay together.
Rows rows_of(const Choice& choice, std::size_t num_rounds, int64_t group);

}  // namespace hdp
