#include "planner/pp_balance/parted.hpp"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <set>
#include <utility>

#include "planner/base/side_by_side.hpp"
#include "planner/pp_balance/menu.hpp"

namespace hdp {
namespace {

// Deals rings to ranks that have run the same rings before: members meet again in backward, so a rank
// that had less to do before would wait there, too, and could not fill the time: it has one
// micro-batch for each of theirs.
class Dealer {
 public:
  explicit Dealer(const Batch& batch) : problem_(batch.problem), batch_(batch) {
    const auto num_ranks = index(problem_.num_ranks);
    seating_.ring_s.assign(num_ranks, 0.0);
    seating_.weight.assign(num_ranks, 1.0);
    Class all;
    for (std::size_t rank = 0; rank < num_ranks; ++rank) {
      all.ranks.push_back(static_cast<int32_t>(rank));
      seating_.speed.push_back(problem_.speed(all.ranks.back()));
    }
    classes_.push_back(std::move(all));
  }

  // The rings that take longest come first: they must meet, and behind one that takes long others
  // give stages work while its first part passes back.
  Seating run(const std::vector<Way>& ways) {
    std::vector<std::size_t> places(ways.size());
    std::iota(places.begin(), places.end(), std::size_t{0});
    const auto key = [&](std::size_t place) {
      const Way& way = ways[place];
      return std::make_pair(way.seconds, way.degree);
    };
    std::stable_sort(places.begin(), places.end(), [&](std::size_t left, std::size_t right) {
      return key(left) > key(right);
    });
    for (const std::size_t place : places) start(place, ways[place]);
    return std::move(seating_);
  }

 private:
  struct Class {
    double clock = 0;
    std::size_t num_rings = 0;
    std::vector<int32_t> ranks;  // ascending
  };

  void start(std::size_t place, const Way& way) {
    const auto degree = index(way.degree);
    auto best = classes_.end();
    for (auto one = classes_.begin(); one != classes_.end(); ++one) {
      if (one->ranks.size() < degree) continue;
      if (best == classes_.end() || std::make_pair(one->clock, one->ranks.size()) <
                                        std::make_pair(best->clock, best->ranks.size())) {
        best = one;
      }
    }
    if (best == classes_.end()) best = joined(degree);
    Class members{best->clock, best->num_rings + 1, {}};
    SeatedRing ring{batch_.order[place], place, 0, false, take(best->ranks, degree), way.num_parts};
    for (const int32_t rank : ring.lanes) {
      ring.seconds = std::max(ring.seconds, way.seconds / problem_.speed(rank));
    }
    members.clock += ring.seconds;
    if (best->num_rings == seating_.rounds.size()) {
      seating_.rounds.emplace_back(seating_.ring_s.size(), kNoRing);
    }
    for (const int32_t rank : ring.lanes) {
      seating_.rounds[best->num_rings][index(rank)] = seating_.rings.size();
      seating_.ring_s[index(rank)] += ring.seconds;
    }
    members.ranks = ring.lanes;
    seating_.rings.push_back(std::move(ring));
    if (best->ranks.empty()) {
      *best = std::move(members);
    } else {
      classes_.push_back(std::move(members));
    }
  }

  // The classes that are free first, so many that they have the ranks, as one.
  std::vector<Class>::iterator joined(std::size_t degree) {
    std::stable_sort(classes_.begin(), classes_.end(), [](const Class& left, const Class& right) {
      return left.clock > right.clock;
    });
    Class all;
    while (all.ranks.size() < degree) {
      const Class& next = classes_.back();
      all.clock = std::max(all.clock, next.clock);
      all.num_rings = std::max(all.num_rings, next.num_rings);
      all.ranks.insert(all.ranks.end(), next.ranks.begin(), next.ranks.end());
      classes_.pop_back();
    }
    std::sort(all.ranks.begin(), all.ranks.end());
    classes_.push_back(std::move(all));
    return std::prev(classes_.end());
  }

  // Of one node if that has so many, the one with the fewest; else of the nodes that have most.
  std::vector<int32_t> take(std::vector<int32_t>& ranks, std::size_t degree) const {
    const auto per_node = static_cast<int32_t>(problem_.cost.ranks_per_node);
    std::vector<std::pair<std::size_t, int32_t>> nodes;  // (ranks, node)
    for (const int32_t rank : ranks) {
      if (nodes.empty() || nodes.back().second != rank / per_node) {
        nodes.emplace_back(0, rank / per_node);
      }
      ++nodes.back().first;
    }
    std::sort(nodes.begin(), nodes.end());
    const auto fits = std::lower_bound(nodes.begin(), nodes.end(), std::make_pair(degree, 0));
    std::vector<int32_t> wanted;  // nodes, the preferred first
    if (fits != nodes.end()) {
      wanted.push_back(fits->second);
    } else {
      std::stable_sort(nodes.begin(), nodes.end(),
                       [](const auto& left, const auto& right) { return left.first > right.first; });
      for (const auto& node : nodes) wanted.push_back(node.second);
    }
    std::vector<int32_t> taken;
    for (const int32_t node : wanted) {
      const auto first = std::lower_bound(ranks.begin(), ranks.end(), node * per_node);
      const auto last = std::lower_bound(first, ranks.end(), (node + 1) * per_node);
      const auto num = std::min<std::ptrdiff_t>(last - first,
                                                static_cast<std::ptrdiff_t>(degree - taken.size()));
      taken.insert(taken.end(), first, first + num);
      if (taken.size() == degree) break;
    }
    std::sort(taken.begin(), taken.end());
    std::vector<int32_t> left;
    std::set_difference(ranks.begin(), ranks.end(), taken.begin(), taken.end(),
                        std::back_inserter(left));
    ranks = std::move(left);
    return taken;
  }

  const Problem& problem_;
  const Batch& batch_;
  Seating seating_;
  std::vector<Class> classes_;  // ranks that have run the same rings
};

// Shares of the makespan that a pass may take.
constexpr double kShares[] = {1.0, 0.7, 0.4, 0.2};

// Of P - 1: how much of a part's time a rank loses in a pass; other micro-batches fill the rest.
constexpr double kRamps[] = {1.0, 0.4};

// Times of parts, as shares of a rank's time.
constexpr double kParts[] = {1.0 / 20, 1.0 / 40, 1.0 / 80, 1.0 / 160, 1.0 / 320, 1.0 / 640};

// Times of parts of rings between full micro-batches of short sequences, in units of these: where
// P - 1 of them stand before and behind a ring, stages have work while its first part passes.
constexpr double kBetween[] = {2.0, 1.4, 1.0, 0.7, 0.5, 0.25};

// Parts of these are shorter.
constexpr double kShortParts = 1.0 / 16;

// So many tastes of a kind with the least estimates become plans, and up to kMostDrafts of small
// problems: as many as place so many sequences and ranks together.
constexpr std::size_t kDrafts = 2;
constexpr std::size_t kMostDrafts = 8;
constexpr std::size_t kDraftWork = 20000;

struct Tried {
  Taste taste;
  double pack_part_s = 0;  // of micro-batches of short sequences
  int64_t lead = 0;        // rows without rings before the others
  const Menu* menu = nullptr;
  double estimate_s = 0;  // of P x the makespan
  double makespan_s = kInfinity;
};

class Search {
 public:
  explicit Search(const Batch& batch)
      : batch_(batch),
        all_(whole_sequences(batch.problem, batch.order)),
        more_(batch.problem.pipeline_stages - 1) {
    menus_.emplace_back(batch, false);
    if (batch.problem.cost.double_rings) menus_.emplace_back(batch, true);
  }

  PipelineDraft run() {
    const std::size_t size = batch_.order.size() + index(batch_.problem.num_ranks);
    const std::size_t num =
        std::clamp(index(batch_.problem.effort) * kDraftWork / size, kDrafts, kMostDrafts);
    std::vector<Tried> tried;
    const auto keep = [&](std::vector<Tried> all) {
      tried.insert(tried.end(), all.begin(), at(all, std::min(num, all.size())));
    };
    for (const Menu& menu : menus_) {
      for (const double share : kShares) keep(estimated(menu, in_short_parts(share)));
      keep(estimated(menu, between_packs()));
    }
    attempt_all(tried);
    const auto best = std::min_element(
        tried.begin(), tried.end(),
        [](const Tried& left, const Tried& right) { return left.makespan_s < right.makespan_s; });
    std::vector<Tried> again;
    for (const int64_t lead : std::set<int64_t>{0, 1, more_}) {
      if (lead == best->lead) continue;
      again.push_back(*best);
      again.back().lead = lead;
    }
    attempt_all(again);
    return std::move(best_);
  }

 private:
  std::vector<Tried> in_short_parts(double share) const {
    std::vector<Tried> all;
    for (const double of_ramp : kRamps) {
      for (const double part : kParts) {
        const double part_s = part * batch_.share_s;
        const double ramp = of_ramp * static_cast<double>(more_);
        all.push_back({{ramp, part_s, share, ramp * part_s}, part_s});
      }
    }
    return all;
  }

  std::vector<Tried> between_packs() const {
    const auto ramp = static_cast<double>(more_);
    const double short_s = kShortParts * batch_.full_s;
    std::vector<Tried> all;
    for (const double part : kBetween) {
      all.push_back({{ramp, part * batch_.full_s, 1, ramp * short_s}, short_s, more_});
    }
    return all;
  }

  // The least first.
  std::vector<Tried> estimated(const Menu& menu, std::vector<Tried> all) const {
    side_by_side(all.size(), [&](std::size_t i) {
      all[i].menu = &menu;
      all[i].estimate_s = menu.least_makespan_s(all[i].taste);
    });
    std::stable_sort(all.begin(), all.end(), [](const Tried& left, const Tried& right) {
      return left.estimate_s < right.estimate_s;
    });
    const auto alike = [](const Tried& left, const Tried& right) {
      return left.estimate_s == right.estimate_s && left.taste.part_s == right.taste.part_s;
    };
    all.erase(std::unique(all.begin(), all.end(), alike), all.end());
    return all;
  }

  void attempt_all(std::vector<Tried>& tried) {
    std::vector<PipelineDraft> drafts(tried.size());
    side_by_side(tried.size(), [&](std::size_t i) { drafts[i] = draft_of(tried[i]); });
    for (std::size_t i = 0; i < tried.size(); ++i) {
      tried[i].makespan_s = drafts[i].makespan_s;
      if (drafts[i].makespan_s < best_.makespan_s) best_ = std::move(drafts[i]);
    }
  }

  PipelineDraft draft_of(const Tried& tried) const {
    const std::vector<Way> ways = tried.menu->choose(tried.taste, tried.estimate_s);
    const Seating seating = Dealer(batch_).run(ways);
    const Shorts shorts(batch_.problem, all_, ways.size());
    Rows rows(index(tried.lead), kNoRound);
    for (std::size_t i = 0; i < seating.rounds.size(); ++i) {
      rows.push_back(static_cast<int64_t>(i));
    }
    return pipeline_draft(batch_.problem, seating, shorts,
                          {std::move(rows), batch_.full_s, tried.pack_part_s},
                          first_shares(seating, shorts.total_s()));
  }

  const Batch& batch_;
  std::vector<Whole> all_;
  std::vector<Menu> menus_;
  int64_t more_;  // P - 1
  PipelineDraft best_;
};

}  // namespace

PipelineDraft in_parts(const Batch& batch) { return Search(batch).run(); }

}  // namespace hdp
