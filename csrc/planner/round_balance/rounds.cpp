#include "planner/round_balance/rounds.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <queue>
#include <utility>

#include "planner/base/cost_model.hpp"
#include "planner/base/slices.hpp"
#include "planner/baselines/baselines.hpp"
#include "planner/baselines/packing.hpp"

namespace hdp {

BlockRounds::BlockRounds(const Problem& problem, Dealing dealing)
    : problem_(problem),
      blocks_(std::move(dealing.blocks)),
      micro_batches_(dealing.sequences.size()) {
  for (std::size_t block = 1; block < micro_batches_.size(); ++block) {
    BestFitDecreasing packing(problem.tokens_per_rank);
    for (const SequenceId id : dealing.sequences[block]) {
      const int64_t length = problem.lengths[index(id)];
      const auto bin = index(packing.place(room_for(problem, length, blocks_.degree(block))));
      if (bin == micro_batches_[block].size()) micro_batches_[block].emplace_back();
      micro_batches_[block][bin].push_back(id);
    }
  }
}

// Micro-batches of each rank.
std::vector<int64_t> BlockRounds::counts() const {
  std::vector<int64_t> counts;
  for (int64_t rank = 0; rank < problem_.num_ranks; ++rank) {
    int64_t count = 0;
    for (std::size_t block = blocks_.leaf(rank); block > 0; block /= 2) {
      count += static_cast<int64_t>(micro_batches_[block].size());
    }
    counts.push_back(count);
  }
  return counts;
}

bool BlockRounds::level(int64_t group) {
  lacking_ = counts();
  const int64_t most = *std::max_element(lacking_.begin(), lacking_.end());
  const int64_t num_rounds = ceil_div(most, group) * group;
  for (int64_t& lacking : lacking_) lacking = num_rounds - lacking;
  part_where_all_lack();
  move_shorts();
  for (bool is_better = true; is_better;) {  // one that was widened may be widened again
    is_better = false;
    for (int64_t rank = 0; rank < problem_.num_ranks; ++rank) {
      while (lacking_[index(rank)] > 0 && widen(blocks_.leaf(rank))) is_better = true;
    }
  }
  return *std::max_element(lacking_.begin(), lacking_.end()) == 0;
}

// How many more micro-batches the sequences of a block could be.
int64_t BlockRounds::num_spare(std::size_t block) const {
  std::size_t spare = 0;
  for (const MicroBatch& one : micro_batches_[block]) spare += one.size() - 1;
  return static_cast<int64_t>(spare);
}

// Makes two micro-batches of the one with the most sequences.
void BlockRounds::part(std::size_t block) {
  std::vector<MicroBatch>& all = micro_batches_[block];
  auto most = std::max_element(all.begin(), all.end(), [](const auto& one, const auto& other) {
    return one.size() < other.size();
  });
  MicroBatch halves[2];
  for (std::size_t i = 0; i < most->size(); ++i) halves[i % 2].push_back((*most)[i]);
  *most = std::move(halves[0]);
  all.push_back(std::move(halves[1]));
}

void BlockRounds::part_where_all_lack() {
  for (std::size_t block = micro_batches_.size() - 1; block > 0; --block) {
    if (micro_batches_[block].empty()) continue;
    const auto first = at(lacking_, index(blocks_.first_rank(block)));
    const auto last = std::next(first, blocks_.degree(block));
    const int64_t count = std::min(*std::min_element(first, last), num_spare(block));
    for (int64_t i = 0; i < count; ++i) part(block);
    std::for_each(first, last, [&](int64_t& lacking) { lacking -= count; });
  }
}

void BlockRounds::move_shorts() {
  using Entry = std::pair<double, std::size_t>;  // (end, leaf), the latest first
  std::priority_queue<Entry> givers;
  for (int64_t rank = 0; rank < problem_.num_ranks; ++rank) {
    const std::size_t leaf = blocks_.leaf(rank);
    if (num_spare(leaf) > 0) givers.emplace(blocks_.end_s(leaf), leaf);
  }
  const auto shortest = [](const MicroBatch& one, const MicroBatch& other) {
    if ((one.size() > 1) != (other.size() > 1)) return one.size() > 1;
    return one.back() < other.back();
  };
  for (int64_t rank = 0; rank < problem_.num_ranks; ++rank) {
    for (int64_t& lacking = lacking_[index(rank)]; lacking > 0 && !givers.empty(); --lacking) {
      const std::size_t giver = givers.top().second;
      givers.pop();
      std::vector<MicroBatch>& from = micro_batches_[giver];
      MicroBatch& one = *std::min_element(from.begin(), from.end(), shortest);
      const SequenceId id = one.back();
      one.pop_back();
      const double seconds = compute_s(problem_.cost, problem_.lengths[index(id)]);
      blocks_.add(giver, -seconds);
      blocks_.add(blocks_.leaf(rank), seconds);
      micro_batches_[blocks_.leaf(rank)].push_back({id});
      if (num_spare(giver) > 0) givers.emplace(blocks_.end_s(giver), giver);
    }
  }
}

// Gives the ranks around one that lacks a micro-batch one that others have.
bool BlockRounds::widen(std::size_t leaf) {
  for (std::size_t block = leaf; block > 1; block /= 2) {
    const std::size_t other = block ^ 1;
    if (!blocks_.is_whole(block / 2)) return false;
    const auto first = at(lacking_, index(blocks_.first_rank(block)));
    const auto last = std::next(first, blocks_.degree(block));
    if (*std::min_element(first, last) == 0) return false;
    if (!has_one_everywhere(other)) continue;
    MicroBatch moved = one_of_all(other);
    if (!has_room(block / 2, moved)) continue;
    drop_one_of_all(other);
    micro_batches_[block / 2].push_back(std::move(moved));
    std::for_each(first, last, [](int64_t& lacking) { --lacking; });
    return true;
  }
  return false;
}

// Whether each rank of a block runs a micro-batch with none outside of it.
bool BlockRounds::has_one_everywhere(std::size_t block) const {
  if (!micro_batches_[block].empty()) return true;
  return block < blocks_.num_leaves() && has_one_everywhere(2 * block) &&
         has_one_everywhere(2 * block + 1);
}

// Short sequences take as much room on more ranks.
bool BlockRounds::has_room(std::size_t block, const MicroBatch& sequences) const {
  int64_t tokens = 0;
  for (const SequenceId id : sequences) {
    tokens += room_for(problem_, problem_.lengths[index(id)], blocks_.degree(block));
  }
  return tokens <= problem_.tokens_per_rank;
}

// The sequences of one micro-batch of each of its ranks.
BlockRounds::MicroBatch BlockRounds::one_of_all(std::size_t block) const {
  const std::vector<MicroBatch>& own = micro_batches_[block];
  if (!own.empty()) return own.back();
  MicroBatch all = one_of_all(2 * block);
  const MicroBatch more = one_of_all(2 * block + 1);
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

// Takes that from them.
void BlockRounds::drop_one_of_all(std::size_t block) {
  std::vector<MicroBatch>& own = micro_batches_[block];
  if (!own.empty()) {
    own.pop_back();
    return;
  }
  drop_one_of_all(2 * block);
  drop_one_of_all(2 * block + 1);
}

Plan BlockRounds::plan(bool wide_first) const {
  struct Entry {
    std::size_t round;
    std::size_t block;
    const MicroBatch* sequences;
  };
  std::vector<Entry> entries;
  std::vector<std::size_t> before(micro_batches_.size());  // by block: rounds of wider ones
  std::size_t num_rounds = 0;
  for (std::size_t block = 1; block < micro_batches_.size(); ++block) {
    std::size_t round = before[block];
    for (const MicroBatch& one : micro_batches_[block]) entries.push_back({round++, block, &one});
    num_rounds = std::max(num_rounds, round);
    if (block < blocks_.num_leaves()) before[2 * block] = before[2 * block + 1] = round;
  }
  const auto place = [&](const Entry& entry) {
    const std::size_t round = wide_first ? entry.round : num_rounds - 1 - entry.round;
    return std::pair(round, blocks_.first_rank(entry.block));
  };
  std::sort(entries.begin(), entries.end(), [&](const Entry& one, const Entry& other) {
    return place(one) < place(other);
  });
  Plan plan;
  for (const Entry& entry : entries) {
    std::vector<int32_t> ring(index(blocks_.degree(entry.block)));
    std::iota(ring.begin(), ring.end(), blocks_.first_rank(entry.block));
    plan.add(ring, *entry.sequences);
  }
  return plan;
}

}  // namespace hdp
