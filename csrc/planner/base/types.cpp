#include "planner/base/types.hpp"

namespace hdp {

void Plan::add(const std::vector<int32_t>& ring, const std::vector<int64_t>& sharded,
               const std::vector<Local>& locals, double offload_ratio) {
  ranks.insert(ranks.end(), ring.begin(), ring.end());
  rank_offsets.push_back(static_cast<int64_t>(ranks.size()));
  sequences.insert(sequences.end(), sharded.begin(), sharded.end());
  sequence_offsets.push_back(static_cast<int64_t>(sequences.size()));
  for (const Local& local : locals) {
    local_sequences.insert(local_sequences.end(), local.sequences.begin(), local.sequences.end());
    local_ranks.insert(local_ranks.end(), local.sequences.size(), local.rank);
  }
  local_offsets.push_back(static_cast<int64_t>(local_sequences.size()));
  offload_ratios.push_back(offload_ratio);
}

void Plan::add_room(const std::vector<int32_t>& ring, int64_t num_sequences) {
  ranks.insert(ranks.end(), ring.begin(), ring.end());
  rank_offsets.push_back(static_cast<int64_t>(ranks.size()));
  sequences.resize(sequences.size() + static_cast<std::size_t>(num_sequences));
  sequence_offsets.push_back(static_cast<int64_t>(sequences.size()));
  local_offsets.push_back(local_offsets.back());
  offload_ratios.push_back(0);
}

}  // namespace hdp
