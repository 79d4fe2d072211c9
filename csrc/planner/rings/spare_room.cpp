#include "planner/rings/spare_room.hpp"

#include <algorithm>

#include "planner/base/cost_model.hpp"
#include "planner/base/slices.hpp"

namespace hdp {

SpareRoom::SpareRoom(const Batch& batch, PlaceSet shorts)
    : batch_(batch), shorts_(std::move(shorts)) {}

// Moves the longest sequence of at most `longest` tokens that fits to the member, if there is one.
bool SpareRoom::place_longest(Member& member, int64_t longest) {
  const int64_t multiple = batch_.problem.slice_multiple;
  const int64_t limit = std::min(longest, member.room / multiple * multiple);
  const std::size_t place = shorts_.next(batch_.lengths.first_within(limit));
  if (place == shorts_.size()) return false;
  shorts_.erase(place);
  member.room -= slice_tokens(batch_.length(place), 1, multiple);
  member.seconds += batch_.compute_s(place);
  member.sequences.push_back(batch_.order[place]);
  return true;
}

double SpareRoom::fill(const std::vector<int32_t>& ranks, int64_t room, Locals& locals) {
  std::vector<Member> members(ranks.size());
  for (Member& member : members) {
    member.room = room;
    member.seconds = batch_.problem.cost.block_all_layers_s;
  }
  double level = 0;
  while (place_longest(members.front(), room)) {
    level = std::max(level, members.front().seconds);
    for (Member& member : members) {
      while (place_longest(member, length_within(batch_.problem.cost, level - member.seconds))) {
      }
    }
  }
  for (std::size_t i = 0; i < members.size(); ++i) {
    const std::vector<SequenceId>& ids = members[i].sequences;
    locals.sequences.insert(locals.sequences.end(), ids.begin(), ids.end());
    locals.ranks.insert(locals.ranks.end(), ids.size(), ranks[i]);
  }
  return level;
}

}  // namespace hdp
