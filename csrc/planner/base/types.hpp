// The planner's question (Problem) and its answer (Plan), as plain data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "planner/base/attention_table.hpp"

namespace hdp {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Seconds, bytes and tokens of one HDP rank; cost_model.hpp has the formulas. A name that Python's
// CostModel has as well means the same there.
struct CostModel {
  double a = 0;                       // s per token^2: attention, forward and backward
  double linear_s_per_token = 0;      // everything linear but attention: b + b_experts
  double g = 0;                       // s per micro-batch, whatever it holds
  double kv_bytes_per_token = 0;      // K and V of all layers
  double intra_node_bytes_per_s = 1;  // of one rank, in a ring that stays in one node
  double inter_node_bytes_per_s = 1;  // of one rank, in a ring that leaves its node
  int64_t ranks_per_node = 8;
  double activation_bytes_per_token = 0;  // of all layers of a rank
  double host_bytes_per_s = 1;            // of one rank, to or from host memory
  int64_t num_layers = 1;                 // of a rank
  AttentionTable attention{};             // instead of a and attention_b, if not empty
  double attention_b = 0;                 // s per token of attention, forward and backward
  // Over all layers of all stages:
  double block_all_layers_s = 0;           // of a block of attention whatever it holds, both passes
  double intra_node_hop_all_layers_s = 0;  // of a hop in one node whatever it carries, one pass
  double inter_node_hop_all_layers_s = 0;  // the same of a ring that leaves its node
  double merge_b = 0;         // s per token of a member for each further step of its ring
  double b_experts = 0;       // s per token of experts, a part of linear_s_per_token
  int64_t window_tokens = 0;  // that a query sees in layers with a window; 0: none has one
  double window_share = 0;    // the part of a that belongs to these layers
  double halo_s = 0;          // s of a ring for what it sends in them, whatever it holds
  double query_ratio = 0;     // bytes that go around for a token's queries, per those of its keys
  double input_share = 0;     // of a layer's activations that its input is; 0: not known
  bool double_rings = false;  // rings over nodes use the links of all members of a node
  double projection_b = 0;    // the part of merge_b for keys that a step makes of what travels
  // K and V of all layers, of heads that travel made, beside latents; 0: none do.
  double made_bytes_per_token = 0;
  double sum_ratio = 2;  // bytes of the sums of a stream's key gradients, per those of its keys
};

// A count or an id as an index of a vector.
constexpr std::size_t index(int64_t value) { return static_cast<std::size_t>(value); }

// An entry of a vector.
template <typename Vector>
auto at(Vector& vector, std::size_t i) {
  return vector.begin() + static_cast<std::ptrdiff_t>(i);
}

// Neighbours in a vector that outlives them.
struct Span {
  const int32_t* first;
  const int32_t* last;

  const int32_t* begin() const { return first; }
  const int32_t* end() const { return last; }
  std::size_t size() const { return index(last - first); }
};

// A place in Problem::lengths. A batch of millions takes half the memory of 64 bits each.
using SequenceId = int32_t;

// Tokens of each sequence of a global batch, kept once however many problems and threads look at
// them. Read-only; copies share the values.
class Lengths {
 public:
  Lengths() = default;
  Lengths(std::vector<int64_t> values) {
    const auto kept = std::make_shared<const std::vector<int64_t>>(std::move(values));
    *this = Lengths(kept->data(), kept->size(), kept);
  }
  Lengths(std::initializer_list<int64_t> values) : Lengths(std::vector<int64_t>(values)) {}

  // Values that `owner` keeps in place and unchanged.
  Lengths(const int64_t* values, std::size_t size, std::shared_ptr<const void> owner)
      : values_(values), size_(size), owner_(std::move(owner)) {}

  const int64_t* begin() const { return values_; }
  const int64_t* end() const { return values_ + size_; }
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  int64_t operator[](std::size_t sequence) const { return values_[sequence]; }

 private:
  const int64_t* values_ = nullptr;
  std::size_t size_ = 0;
  std::shared_ptr<const void> owner_;
};

struct Problem {
  Lengths lengths;  // tokens of each sequence of the global batch
  int64_t num_ranks = 1;
  int64_t tokens_per_rank = 1;  // capacity C
  int64_t slice_multiple = 1;   // a chunk is padded to a multiple of this
  int64_t max_length = 1;       // the context length; only the static mesh depends on it
  int64_t pipeline_stages = 1;  // ranks are pipelines of this many stages P
  int64_t model_chunks = 1;     // parts of the model on each stage, V
  // Share of a micro-batch's time of each part, of sum 1; part c P + s is chunk c of stage s.
  // Empty: all are equal.
  std::vector<double> row_weights;
  bool offload = false;  // activations may go to host memory
  double host_memory_bytes = kInfinity;  // that a micro-batch may fill there, on a rank
  bool streams = false;        // sequences may stream, see base/stream.hpp
  bool recompute = false;      // sequences may be recomputed in backward, see base/memory.hpp
  int64_t effort = 1;          // scales the number of iterations of local search
  int64_t sequence_parts = 1;  // the most parts of a micro-batch
  double linear_tokens = 0;    // where parts are cut: what a token takes besides attention, in keys
  int64_t expert_ranks = 1;    // so many neighbouring ranks share experts, and run in lockstep
  std::vector<double> speeds;  // by rank; 1 is what the cost model describes; empty: all 1
  CostModel cost;

  double speed(int32_t rank) const { return speeds.empty() ? 1.0 : speeds[index(rank)]; }
};

// Whether backward may compute a sequence again: recomputed, or as a stream.
inline bool may_compute_twice(const Problem& problem) {
  return problem.streams || problem.recompute;
}

// Whole sequences in the spare room of ring members.
struct Locals {
  std::vector<int32_t> ranks;  // of each sequence; ascending within a ring
  std::vector<SequenceId> sequences;
};

// Micro-batches in launch order, flat: micro-batch m owns [offsets[m], offsets[m + 1]).
struct Plan {
  std::vector<int32_t> rank_offsets{0};
  std::vector<int32_t> ranks;
  std::vector<int32_t> sequence_offsets{0};
  std::vector<SequenceId> sequences;
  std::vector<int32_t> local_offsets{0};  // up to the last micro-batch with locals
  Locals locals;
  std::vector<double> offload_ratios;  // up to the last micro-batch with another one than 0
  std::vector<int32_t> num_parts;  // of the micro-batches but streams; empty: all run whole
  std::vector<int32_t> stream_parts;   // up to the last micro-batch that streams; 0: it does not
  std::vector<bool> recomputed;    // up to the last micro-batch that is computed again in backward
  std::vector<int32_t> positions;  // of the micro-batches in their ranks' lists; empty: not given

  int64_t num_micro_batches() const { return static_cast<int64_t>(rank_offsets.size()) - 1; }

  // The ranks of micro-batch m, and the sequences that it shares over all of them.
  Span ring(int64_t m) const { return owned(ranks, rank_offsets, m); }
  Span sharded(int64_t m) const { return owned(sequences, sequence_offsets, m); }

  // local_offsets[m], of any micro-batch or the end.
  int32_t local_offset(int64_t m) const {
    const auto i = index(m);
    return i < local_offsets.size() ? local_offsets[i] : local_offsets.back();
  }

  // offload_ratios[m], of any micro-batch.
  double offload_ratio(int64_t m) const {
    const auto i = index(m);
    return i < offload_ratios.size() ? offload_ratios[i] : 0;
  }

  // In how many parts micro-batch m streams; 0: it does not.
  int64_t parts_of_stream(int64_t m) const {
    const auto i = index(m);
    return i < stream_parts.size() ? stream_parts[i] : 0;
  }

  // In how many parts micro-batch m runs.
  int64_t parts(int64_t m) const {
    const int64_t streamed = parts_of_stream(m);
    if (streamed > 0) return streamed;
    return num_parts.empty() ? 1 : num_parts[index(m)];
  }

  // Whether micro-batch m is computed again in backward.
  bool is_recomputed(int64_t m) const {
    const auto i = index(m);
    return i < recomputed.size() && recomputed[i];
  }

  // Makes room for so many in all, so that appending does not move what is there.
  void reserve(std::size_t num_micro_batches, std::size_t num_members, std::size_t num_sequences);

  // Appends a micro-batch. Throws std::invalid_argument if all rings together get 2^31 members.
  void add(const std::vector<int32_t>& ring, const std::vector<SequenceId>& sharded,
           double offload_ratio = 0);

  // Appends a micro-batch that streams; its offload ratio is the share of parts with keys on the
  // host.
  void add_stream(const std::vector<int32_t>& ring, SequenceId sequence, int64_t num_parts,
                  int64_t host_parts);

  // The micro-batch added last streams.
  void stream_last(int64_t num_parts);

  // The micro-batch added last is computed again in backward.
  void recompute_last();

  // The micro-batch added last has the locals up to `end`.
  void end_locals(std::size_t end);

  // Appends a micro-batch whose sequences are put into `sequences` later.
  void add_room(const std::vector<int32_t>& ring, int32_t num_sequences);

 private:
  static Span owned(const std::vector<int32_t>& values, const std::vector<int32_t>& offsets,
                    int64_t m) {
    return {values.data() + offsets[index(m)], values.data() + offsets[index(m) + 1]};
  }

  void add_ring(const std::vector<int32_t>& ring);
};

// Throws std::invalid_argument for a malformed problem or one with a sequence that does not fit; it
// names what was found, expected and the remedy.
void check(const Problem& problem);

}  // namespace hdp
