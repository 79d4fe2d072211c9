#include "planner/pp_balance/parted.hpp"

#include <algorithm>
#include <iterator>
#include <memory>
#include <numeric>
#include <set>
#include <utility>

#include "planner/base/side_by_side.hpp"
#include "planner/pp_balance/menu.hpp"
#include "planner/schedule/schedule.hpp"

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
    ring.seconds = ring_seconds(batch_, place, way, ring.lanes);
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

// Of the ramp: how much of a part's time a rank loses in a pass; other micro-batches fill the rest.
constexpr double kRamps[] = {1.0, 0.4};

// Times of parts, as shares of a rank's time.
constexpr double kParts[] = {1.0 / 20, 1.0 / 40, 1.0 / 80, 1.0 / 160, 1.0 / 320, 1.0 / 640};

// Times of parts of rings between full micro-batches of short sequences, in units of these: where
// P - 1 of them stand before and behind a ring, stages have work while its first part passes.
constexpr double kBetween[] = {2.0, 1.4, 1.0, 0.7, 0.5, 0.25};

// Parts of these are shorter.
constexpr double kShortParts = 1.0 / 16;

// So many tastes of a kind with the least estimates are sketched, and so many sketches become plans;
// of small problems more: as many as place so many sequences and ranks together, up to kMost.
constexpr std::size_t kSketches = 2;
constexpr std::size_t kDrafts = 2;
constexpr std::size_t kMost = 8;
constexpr std::size_t kDraftWork = 20000;

// So many of the best sketches are tried with other rows before their rings, too.
constexpr std::size_t kLeaders = 2;

// Sketches that are worked out at the same time. Corrections bring more here than to whole
// micro-batches: up to so much slower than the best counts as equal to it.
constexpr std::size_t kAtOnce = 4;
constexpr double kAsGood = 1.15;

// Rings on their ranks, and the same of lanes.
struct Dealt {
  Seating seating;
  Outline small;
  Shorts shorts;
};

struct Tried {
  Tried(const Taste& wanted, double of_packs_s, int64_t rows)
      : taste(wanted), pack_part_s(of_packs_s), lead(rows) {}

  Taste taste;
  double pack_part_s = 0;  // of micro-batches of short sequences
  int64_t lead = 0;        // rows without rings before the others
  const Menu* menu = nullptr;
  double estimate_s = 0;  // of P x the makespan
  std::vector<Way> ways;
  std::shared_ptr<const Dealt> dealt;
  Sketch sketch;

  bool runs_as(const Tried& other) const {
    return pack_part_s == other.pack_part_s && lead == other.lead && ways == other.ways;
  }
};

class Search {
 public:
  explicit Search(const Batch& batch)
      : batch_(batch),
        all_(whole_sequences(batch.problem, batch.order)),
        more_(batch.problem.pipeline_stages - 1),
        ramp_(parts_of_ramp(batch.problem)) {
    menus_.emplace_back(batch, false);
    if (batch.problem.cost.double_rings) menus_.emplace_back(batch, true);
  }

  PipelineDraft run() {
    for (const Menu& menu : menus_) {
      for (const double share : kShares) keep(estimated(menu, in_short_parts(share)));
      keep(estimated(menu, between_packs()));
    }
    sketch_from(0);
    const std::size_t first = tried_.size();
    for (std::size_t i = 0; i < std::min(kLeaders, first); ++i) {
      for (const int64_t lead : leads()) {
        Tried other = tried_[i];
        other.lead = lead;
        add(std::move(other));
      }
    }
    sketch_from(first);
    return best_draft();
  }

 private:
  std::vector<Tried> in_short_parts(double share) const {
    std::vector<Tried> all;
    for (const double of_ramp : kRamps) {
      for (const double part : kParts) {
        const double part_s = part * batch_.share_s;
        const double ramp = of_ramp * ramp_;
        all.push_back({{ramp, part_s, share, ramp * part_s}, part_s, 0});
      }
    }
    return all;
  }

  std::vector<Tried> between_packs() const {
    const double short_s = kShortParts * batch_.full_s;
    std::vector<Tried> all;
    for (const double part : kBetween) {
      all.push_back({{ramp_, part * batch_.full_s, 1, ramp_ * short_s}, short_s, more_});
    }
    return all;
  }

  // Numbers of rows before the rings; with chunks whole groups.
  std::set<int64_t> leads() const {
    if (batch_.problem.model_chunks == 1) return {0, 1, more_};
    const int64_t group = group_size(batch_.problem);
    return {0, group, 2 * group};
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

  std::size_t num_of_work(std::size_t least) const {
    const std::size_t size = batch_.order.size() + index(batch_.problem.num_ranks);
    return std::clamp(index(batch_.problem.effort) * kDraftWork / size, least, kMost);
  }

  // The first of a kind.
  void keep(std::vector<Tried> all) {
    const std::size_t num = std::min(num_of_work(kSketches), all.size());
    for (auto one = all.begin(); one != at(all, num); ++one) {
      one->ways = one->menu->choose(one->taste, one->estimate_s);
      add(std::move(*one));
    }
  }

  void add(Tried&& tried) {
    const auto is_it = [&](const Tried& other) { return other.runs_as(tried); };
    if (std::none_of(tried_.begin(), tried_.end(), is_it)) tried_.push_back(std::move(tried));
  }

  // Those behind the first so many, a few at a time; then all, the fastest first.
  void sketch_from(std::size_t first) {
    double least_s = first > 0 ? tried_[0].sketch.makespan_s : kInfinity;
    for (std::size_t next = first; next < tried_.size(); next += kAtOnce) {
      const std::size_t num = std::min(kAtOnce, tried_.size() - next);
      side_by_side(num, [&](std::size_t i) { sketch_one(tried_[next + i], kAsGood * least_s); });
      for (std::size_t i = next; i < next + num; ++i) {
        least_s = std::min(least_s, tried_[i].sketch.makespan_s);
      }
    }
    std::stable_sort(tried_.begin(), tried_.end(), [](const Tried& left, const Tried& right) {
      return left.sketch.makespan_s < right.sketch.makespan_s;
    });
  }

  void sketch_one(Tried& tried, double least_s) const {
    if (!tried.dealt) tried.dealt = deal(tried.ways);
    const Dealt& dealt = *tried.dealt;
    tried.sketch = sketch(batch_.problem, dealt.small.seating, dealt.shorts, arrangement(tried),
                          least_s);
  }

  std::shared_ptr<const Dealt> deal(const std::vector<Way>& ways) const {
    Seating seating = Dealer(batch_).run(ways);
    Outline small = outline(seating);
    return std::make_shared<Dealt>(Dealt{std::move(seating), std::move(small),
                                         Shorts(batch_.problem, all_, ways.size())});
  }

  Arrangement arrangement(const Tried& tried) const {
    Rows rows(index(tried.lead), kNoRound);
    for (std::size_t i = 0; i < tried.dealt->seating.rounds.size(); ++i) {
      rows.push_back(static_cast<int64_t>(i));
    }
    return {std::move(rows), batch_.full_s, tried.pack_part_s};
  }

  // Of the first so many; of more if short sequences are too few for all of these. In small problems
  // ranks have few sequences, which fill no share exactly: other shares may turn out better.
  PipelineDraft best_draft() const {
    const std::size_t num = std::min(num_of_work(kDrafts), tried_.size());
    std::vector<PipelineDraft> drafts(num > kDrafts ? 2 * num : num);
    side_by_side(drafts.size(), [&](std::size_t i) {
      drafts[i] = i < num ? draft_of(tried_[i], tried_[i].sketch.shares)
                          : draft_of(tried_[i - num], first_shares_of(tried_[i - num]));
    });
    PipelineDraft best;
    for (PipelineDraft& one : drafts) {
      if (one.makespan_s < best.makespan_s) best = std::move(one);
    }
    for (std::size_t i = num; i < tried_.size() && best.makespan_s == kInfinity; ++i) {
      best = draft_of(tried_[i], first_shares_of(tried_[i]));
    }
    return best;
  }

  std::vector<double> first_shares_of(const Tried& tried) const {
    return first_shares(tried.dealt->small.seating, tried.dealt->shorts.total_s());
  }

  // `shares`: by lane; no plan if there are none.
  PipelineDraft draft_of(const Tried& tried, const std::vector<double>& shares) const {
    if (shares.empty()) return {};
    const Dealt& dealt = *tried.dealt;
    std::vector<double> of_ranks;
    for (const std::size_t lane : dealt.small.lane_of_rank) of_ranks.push_back(shares[lane]);
    return pipeline_draft(batch_.problem, dealt.seating, dealt.shorts, arrangement(tried),
                          std::move(of_ranks));
  }

  const Batch& batch_;
  std::vector<Whole> all_;
  std::vector<Menu> menus_;
  int64_t more_;  // P - 1
  double ramp_;   // parts_of_ramp
  std::vector<Tried> tried_;
};

}  // namespace

PipelineDraft in_parts(const Batch& batch) { return Search(batch).run(); }

}  // namespace hdp
