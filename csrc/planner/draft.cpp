#include "planner/draft.hpp"

#include "planner/shorts.hpp"

namespace hdp {

Scheduled draft(const Batch& batch, const Decisions& decisions) {
  const RingSchedule rings = place_rings(batch, decisions);
  return scheduled(batch.problem, place_shorts(batch, rings,
                                               decisions.fill_spare_room
                                                   ? rings.shorts
                                                   : places_of_shorts(batch, decisions.degrees)));
}

}  // namespace hdp
