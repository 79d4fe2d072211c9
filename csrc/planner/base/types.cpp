#include "planner/base/types.hpp"

#include <limits>
#include <stdexcept>

namespace hdp {

void Plan::reserve(std::size_t num_micro_batches, std::size_t num_members,
                   std::size_t num_sequences) {
  rank_offsets.reserve(num_micro_batches + 1);
  ranks.reserve(num_members);
  sequence_offsets.reserve(num_micro_batches + 1);
  sequences.reserve(num_sequences);
}

void Plan::add(const std::vector<int32_t>& ring, const std::vector<SequenceId>& sharded,
               double offload_ratio) {
  const auto m = index(num_micro_batches());
  add_ring(ring);
  sequences.insert(sequences.end(), sharded.begin(), sharded.end());
  sequence_offsets.push_back(static_cast<int32_t>(sequences.size()));
  if (offload_ratio != 0) {
    offload_ratios.resize(m);
    offload_ratios.push_back(offload_ratio);
  }
}

void Plan::add_stream(const std::vector<int32_t>& ring, SequenceId sequence, int64_t num_parts,
                      int64_t host_parts) {
  add(ring, {sequence}, static_cast<double>(host_parts) / static_cast<double>(num_parts));
  stream_last(num_parts);
}

void Plan::stream_last(int64_t num_parts) {
  stream_parts.resize(index(num_micro_batches()));
  stream_parts.back() = static_cast<int32_t>(num_parts);
}

void Plan::recompute_last() {
  recomputed.resize(index(num_micro_batches()));
  recomputed.back() = true;
}

void Plan::end_locals(std::size_t end) {
  const auto last = static_cast<int32_t>(end);
  if (last == local_offsets.back()) return;
  local_offsets.resize(rank_offsets.size() - 1, local_offsets.back());
  local_offsets.push_back(last);
}

void Plan::add_room(const std::vector<int32_t>& ring, int32_t num_sequences) {
  add_ring(ring);
  sequences.resize(sequences.size() + index(num_sequences));
  sequence_offsets.push_back(static_cast<int32_t>(sequences.size()));
}

void Plan::add_ring(const std::vector<int32_t>& ring) {
  constexpr std::size_t kMostMembers = std::numeric_limits<int32_t>::max();
  if (ring.size() > kMostMembers - ranks.size()) {
    throw std::invalid_argument(
        "the rings of the plan have more than 2,147,483,647 members together: plan fewer sequences "
        "at once or raise tokens_per_rank");
  }
  ranks.insert(ranks.end(), ring.begin(), ring.end());
  rank_offsets.push_back(static_cast<int32_t>(ranks.size()));
}

}  // namespace hdp
