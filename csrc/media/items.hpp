// Which ranks encode which items of a step: images, temporal patches of videos, windows of audio.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hdp {

// Seconds of an item of n patches on a rank of speed 1: patch_s n + patch2_s n^2.
struct ItemCost {
  double patch_s = 0;
  double patch2_s = 0;  // attention among the item's patches
  double pack_s = 0;    // of a call of the encoder, which takes a pack of items
  // Cut over several ranks, their keys and values go around a ring: seconds of each patch of others
  // in all layers, both passes. A hop hides under the attention before it.
  double gathered_s_per_patch = 0;
};

struct ItemProblem {
  std::vector<int64_t> patches;     // of each item
  std::vector<int32_t> consumers;   // the rank whose sequence holds each item; empty: none is near
  std::vector<double> speeds;       // of each rank
  std::vector<double> busy_s;       // of each rank: until when it does something else; empty: 0
  double free_s = 0;                // until when encoding costs nothing: nothing is cut to end sooner
  int64_t ranks_per_node = 1;       // ranks k * ranks_per_node and behind share node k
  int64_t most_ranks = 8;           // that encode one item together
  int64_t patches_per_row = 1;      // an item is cut between rows of its embeddings
  int64_t patches_per_pack = 0;     // the most that a call of the encoder takes
  ItemCost cost;
};

// An item is encoded by `degrees` ranks from `first_ranks` on, which have equally many of its rows,
// up to one. Cut items come first, in the order of their turns, which is the same for all
// ranks: two that share ranks meet in one order everywhere. Then each rank encodes its whole items,
// pack by pack: their turns are numbers of packs.
struct ItemPlan {
  std::vector<int32_t> first_ranks;
  std::vector<int32_t> degrees;
  std::vector<int32_t> turns;
  double makespan_s = 0;  // of the ranks that encode
};

// Longest first to the rank that is done first (LPT; Graham 1969), near its consumer where that
// costs nothing; items that would rule the step alone are cut over 2, 4, 8 ... ranks of a node.
// Pure: the same problem gives the same plan.
//
// Throws std::invalid_argument for figures that are none, and for an item that no node can hold.
ItemPlan plan_items(const ItemProblem& problem);

}  // namespace hdp
