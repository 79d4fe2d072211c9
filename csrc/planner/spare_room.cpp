#include "planner/spare_room.hpp"

#include <algorithm>
#include <limits>

#include "planner/cost_model.hpp"
#include "planner/slices.hpp"

namespace hdp {

SpareRoom::SpareRoom(const Problem& problem, const std::vector<int64_t>& shorts)
    : problem_(problem) {
  for (const int64_t id : shorts) {
    shorts_.emplace_hint(shorts_.begin(), problem.lengths[static_cast<std::size_t>(id)], -id);
  }
}

// Moves the longest sequence of at most `longest` tokens that fits to the member, if there is one.
bool SpareRoom::place_longest(Member& member, int64_t longest) {
  const int64_t multiple = problem_.slice_multiple;
  const int64_t limit = std::min(longest, member.room / multiple * multiple);
  auto found = shorts_.upper_bound({limit, std::numeric_limits<int64_t>::max()});
  if (found == shorts_.begin()) return false;
  --found;
  const auto [length, negative_id] = *found;
  shorts_.erase(found);
  member.room -= slice_tokens(length, 1, multiple);
  member.seconds += compute_s(problem_.cost, length);
  member.sequences.push_back(-negative_id);
  return true;
}

double SpareRoom::fill(const std::vector<int32_t>& ranks, int64_t room,
                       std::vector<Local>& locals) {
  std::vector<Member> members(ranks.size());
  for (Member& member : members) member.room = room;
  double level = 0;
  while (place_longest(members.front(), room)) {
    level = std::max(level, members.front().seconds);
    for (Member& member : members) {
      while (place_longest(member, length_within(problem_.cost, level - member.seconds))) {
      }
    }
  }
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (!members[i].sequences.empty()) locals.push_back({ranks[i], members[i].sequences});
  }
  return level;
}

std::vector<int64_t> SpareRoom::remaining() const {
  std::vector<int64_t> ids;
  for (auto entry = shorts_.rbegin(); entry != shorts_.rend(); ++entry)
    ids.push_back(-entry->second);
  return ids;
}

}  // namespace hdp
