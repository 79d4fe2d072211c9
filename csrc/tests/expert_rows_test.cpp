// Unit tests of what ranks that share experts need.
#include <algorithm>
#include <cmath>

#include "planner/base/cost_model.hpp"
#include "planner/ep_balance/rank_groups.hpp"
#include "planner/ep_balance/rows.hpp"
#include "tests/checking.hpp"

namespace {

constexpr int64_t kSize = 4;

// A domain of four ranks of one node, whose rings lose nothing.
hdp::Problem problem(int64_t capacity) {
  hdp::Problem result;
  result.num_ranks = kSize;
  result.expert_ranks = kSize;
  result.tokens_per_rank = capacity;
  result.cost.linear_s_per_token = 1;
  result.cost.ranks_per_node = kSize;
  return result;
}

// Lengths of all sizes that fall, some of them alike.
hdp::Items items(const hdp::Problem& dense, int64_t count, int64_t longest) {
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < count; ++i) lengths.push_back(1 + i * i * 7919 % longest);
  std::sort(lengths.rbegin(), lengths.rend());
  hdp::Items result;
  for (const int64_t length : lengths) {
    const auto id = static_cast<hdp::SequenceId>(result.size());
    result.push_back({id, length, length, hdp::compute_s(dense.cost, length)});
  }
  return result;
}

// What the first group of a height takes, found by trying one sequence after the other.
hdp::Places tried(const hdp::Items& items, double work_s, int64_t tokens, double enough_s) {
  hdp::Places places;
  for (std::size_t place = 0; place < items.size() && work_s > enough_s && tokens > 0; ++place) {
    const hdp::Item& item = items[place];
    if (item.dense_s > work_s || item.tokens > tokens) continue;
    places.push_back(place);
    work_s -= item.dense_s;
    tokens -= item.tokens;
  }
  return places;
}

TEST(test_search_finds_what_trying_finds) {
  for (const double a : {0.0, 0.01, 1.0}) {
    hdp::Problem dense = problem(500);
    dense.cost.a = a;
    dense.cost.kv_bytes_per_token = 0;  // one group of all ranks
    const hdp::Items all = items(dense, 300, 400);
    hdp::SlotFiller filler(dense, all);
    filler.start();
    for (const double part : {2.0, 1.0, 0.6, 0.3}) {
      const double height_s = part * all[0].dense_s / kSize + 1;
      hdp::Draft draft;
      filler.draft({height_s, false}, draft);
      const std::size_t first = draft.places.at(0);
      CHECK(draft.groups.size() == 1);
      const double work_s = height_s * kSize;
      const hdp::Item& opening = all[first];
      hdp::Items others = all;
      others[first].tokens = 10000;  // taken
      hdp::Places places = tried(others, work_s - opening.dense_s,
                                 kSize * dense.tokens_per_rank - opening.tokens, 1e-3 * work_s);
      places.insert(places.begin(), first);
      CHECK(places == draft.places);
    }
  }
}

TEST(test_drafts_take_nothing) {
  const hdp::Problem dense = problem(50);
  const hdp::Items all = items(dense, 100, 50);
  hdp::SlotFiller filler(dense, all);
  filler.start();
  const hdp::Target half{filler.target().height_s / 2, false};
  hdp::Draft draft;
  filler.draft(half, draft);
  const hdp::Places places = draft.places;
  filler.draft(half, draft);
  CHECK(!places.empty() && places == draft.places);
  filler.take(places[0]);
  filler.draft(half, draft);
  CHECK(std::count(draft.places.begin(), draft.places.end(), places[0]) == 0);
}

// All ranks together do the same, however much is sharded at first.
TEST(test_more_is_sharded_where_that_loses_less) {
  const hdp::Problem dense = problem(1000);
  for (const int64_t longest : {100, 400, 900}) {
    const hdp::Items all = items(dense, 6, longest);
    hdp::Row row;
    for (std::size_t place = 0; place < all.size(); ++place) row.places.push_back(place);
    row.owners.resize(all.size());
    hdp::RankGroup group;
    group.num_ranks = kSize;
    group.end = all.size();
    hdp::GroupSharing sharing(dense, all);
    sharing.share(row, group, 0);
    double all_s = 0;
    for (const hdp::Item& item : all) all_s += item.dense_s;
    CHECK(std::abs(group.dense_s - all_s) < 1e-9 * all_s);
    CHECK(group.seconds * kSize <= 1.01 * all_s);
    CHECK(row.owners[0] == hdp::kSharded);
    // the longest alone on a rank is enough where others take as long
    sharing.share(row, group, all_s);
    CHECK(row.owners[0] >= 0 && group.seconds >= all[0].dense_s);
    const double whole_s = group.seconds;
    sharing.share(row, group, 0.99 * whole_s);
    CHECK(row.owners[0] == hdp::kSharded && group.seconds <= 0.99 * whole_s);
  }
}

TEST(test_all_are_dealt_once) {
  const hdp::Problem dense = problem(60);
  const hdp::Items all = items(dense, 200, 150);
  hdp::Rows rows(dense, all);
  for (const int32_t first : {0, 4}) {
    rows.start(first);
    hdp::MicroBatches made;
    int32_t num_rows = 0;
    while (const hdp::Row* row = rows.next()) made.add(100 - num_rows++, *row, all);
    const hdp::Plan plan = made.sorted();
    CHECK(std::is_sorted(plan.positions.begin(), plan.positions.end()));
    std::vector<hdp::SequenceId> ids = plan.sequences;
    ids.insert(ids.end(), plan.locals.sequences.begin(), plan.locals.sequences.end());
    std::sort(ids.begin(), ids.end());
    CHECK(ids.size() == all.size());
    for (std::size_t i = 0; i < ids.size(); ++i) CHECK(ids[i] == static_cast<int32_t>(i));
    for (const int32_t rank : plan.ranks) CHECK(rank >= first && rank < first + kSize);
    for (const int32_t rank : plan.locals.ranks) CHECK(rank >= first && rank < first + kSize);
  }
}

}  // namespace
