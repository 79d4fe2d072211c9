#include "planner/pp_balance/menu.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <utility>

#include "planner/base/cost_model.hpp"
#include "planner/base/parts.hpp"
#include "planner/base/slices.hpp"
#include "planner/base/stream.hpp"
#include "planner/schedule/schedule.hpp"
#include "planner/schedule/ways.hpp"
#include "planner/rings/degrees.hpp"
#include "planner/rings/rings.hpp"

namespace hdp {
namespace {

// Numbers of parts: about a third more each.
std::vector<int64_t> numbers_of_parts(int64_t most) {
  std::vector<int64_t> numbers;
  for (const int64_t low : {2, 3}) {
    for (int64_t number = low; number <= most; number *= 2) numbers.push_back(number);
  }
  numbers.push_back(1);
  numbers.push_back(most);
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  return numbers;
}

// A ring that takes less than this share of a rank's time need not be wider, and parts of a member
// that take less than the other need not be shorter.
constexpr double kLeastShare = 1.0 / 16;
constexpr double kLeastPart = 1.0 / 1000;

// A sequence whose pass on one rank takes less than this share of a rank's time is no ring.
constexpr double kShort = 0.5;

// The least degree and wider ones, about a fifth more each, and a whole node.
std::vector<int64_t> degrees_of(const Batch& batch, std::size_t place, bool whole_nodes) {
  const int64_t least = batch.least[place];
  std::vector<int64_t> degrees{least};
  const int64_t per_node = batch.problem.cost.ranks_per_node;
  const auto offer_one = [&](int64_t degree) {
    if (degree > least && may_share(batch.problem, batch.length(place), least, degree)) {
      degrees.push_back(degree);
    }
  };
  const auto offer = [&](int64_t degree) {
    offer_one(degree);
    if (whole_nodes) offer_one(ceil_div(degree, per_node) * per_node);
  };
  offer(per_node);
  offer(least);
  const double widest = batch.compute_s(place) / (kLeastShare * batch.share_s);
  const double most = std::min(widest, static_cast<double>(batch.problem.num_ranks));
  for (int64_t degree = least + 1 + least / 5; static_cast<double>(degree) < most;
       degree += 1 + degree / 5) {
    offer(degree);
  }
  if (widest >= most) offer(batch.problem.num_ranks);
  std::sort(degrees.begin(), degrees.end());
  degrees.erase(std::unique(degrees.begin(), degrees.end()), degrees.end());
  return degrees;
}

// P times what a pass of all stages takes. With chunks a part is back on the first stage after P of
// them: it waits at every chunk for those that are missing.
double pass_s(const Problem& problem, double seconds, double part_s) {
  const auto stages = static_cast<double>(problem.pipeline_stages);
  const double missing_s = problem.model_chunks == 1 ? 0 : std::max(0.0, stages * part_s - seconds);
  return seconds + missing_s + parts_of_ramp(problem) * part_s;
}

// That of a sequence in so many parts.
Way way_of(const Problem& problem, int64_t degree, int64_t num_parts, double seconds,
           double part_s, Links links) {
  return {static_cast<int32_t>(degree), static_cast<int32_t>(num_parts), seconds, part_s,
          pass_s(problem, seconds, part_s), links};
}

// Of all members; of ways that cost the same a narrow one serves.
double work_of(const Way& way) {
  constexpr double kWidth = 1e-5;
  const auto degree = static_cast<double>(way.degree);
  return degree * way.seconds * (1 + kWidth * degree);
}

// Those that no other one beats in work, in its pass and in its parts.
std::vector<Way> best_of(std::vector<Way> ways) {
  std::stable_sort(ways.begin(), ways.end(),
                   [&](const Way& left, const Way& right) { return work_of(left) < work_of(right); });
  std::vector<Way> best;
  for (const Way& way : ways) {
    const bool is_beaten = std::any_of(best.begin(), best.end(), [&](const Way& other) {
      return other.pass_s <= way.pass_s && other.part_s <= way.part_s;
    });
    if (!is_beaten) best.push_back(way);
  }
  return best;
}

std::vector<Way> ways_of(const Batch& batch, std::size_t place, const std::vector<int64_t>& numbers,
                         bool whole_nodes) {
  const Problem& problem = batch.problem;
  const CostModel& cost = problem.cost;
  const int64_t length = batch.length(place);
  const double compute = batch.compute_s(place);
  std::vector<int64_t> degrees = degrees_of(batch, place, whole_nodes);
  const auto links_on = [&](int64_t degree) {
    return whole_nodes || degree <= cost.ranks_per_node ? likely_links(cost, degree)
                                                        : links_between_nodes(cost, 1);
  };
  std::vector<Way> ways;
  if (problem.streams) {  // its parts are given
    const auto is_stream = [&](int64_t degree) {
      const auto stream = stream_of(problem, length, degree);
      if (!stream) return false;
      const Links links = links_on(degree);
      const double seconds = stream_s(problem, length, degree, *stream, links);
      ways.push_back(way_of(problem, degree, stream->num_parts, seconds,
                            longest_part_s(problem, length, *stream, seconds), links));
      return true;
    };
    degrees.erase(std::remove_if(degrees.begin(), degrees.end(), is_stream), degrees.end());
    if (degrees.empty()) return best_of(std::move(ways));
  }
  for (const int64_t number : numbers) {
    const double most_s = compute / static_cast<double>(degrees.front() * number);
    if (number > 1 && most_s < kLeastPart * batch.share_s) break;
    const std::vector<PartSize> sizes = part_sizes({static_cast<double>(length)}, number, problem.linear_tokens);
    for (const int64_t degree : degrees) {
      const Links links = links_on(degree);
      const double seconds = sequence_s(problem, length, degree, sizes, links);
      ways.push_back(way_of(problem, degree, number, seconds,
                            seconds / static_cast<double>(number), links));
    }
  }
  return best_of(std::move(ways));
}

}  // namespace

Menu::Menu(const Batch& batch, bool whole_nodes) : batch_(batch) {
  const std::vector<int64_t> numbers = numbers_of_parts(batch.problem.sequence_parts);
  for (std::size_t place = 0; place < batch.num_big; ++place) {
    const double compute = batch.compute_s(place);
    const double least_s =
        pass_s(batch.problem, compute, compute / static_cast<double>(numbers.back()));
    const bool must_be = is_ring(batch.problem, batch.length(place), 1);
    if (!must_be && least_s < kShort * batch.share_s) break;
    const bool again = place > 0 && batch.length(place) == batch.length(place - 1);
    ways_.push_back(again ? ways_.back() : ways_of(batch, place, numbers, whole_nodes));
    by_pass_.emplace_back(ways_.back().size());
    std::iota(by_pass_.back().begin(), by_pass_.back().end(), std::size_t{0});
    std::stable_sort(by_pass_.back().begin(), by_pass_.back().end(),
                     [&](std::size_t left, std::size_t right) {
                       return ways_.back()[left].pass_s < ways_.back()[right].pass_s;
                     });
    compute_s_.push_back(batch.compute_s(place));
  }
}

std::vector<std::vector<Menu::Offer>> Menu::offers(const Taste& taste) const {
  std::vector<std::vector<Offer>> result(ways_.size());
  for (std::size_t place = 0; place < ways_.size(); ++place) {
    std::vector<Offer>& here = result[place];
    double least = kInfinity;
    for (const std::size_t i : by_pass_[place]) {
      const Way& way = ways_[place][i];
      const double late_s = taste.ramp * std::max(0.0, way.part_s - taste.part_s);
      const double price = work_of(way) + static_cast<double>(way.degree) * late_s;
      if (!here.empty() && (price > least || (price == least && &way > here.back().way))) continue;
      least = price;
      here.push_back({way.pass_s, &way});
    }
  }
  return result;
}

template <typename Visit>
void Menu::choose(const std::vector<std::vector<Offer>>& offers, double most_s,
                  const Visit& visit) const {
  for (std::size_t place = 0; place < offers.size(); ++place) {
    const auto too_long =
        std::upper_bound(offers[place].begin(), offers[place].end(), most_s,
                         [](double limit_s, const Offer& offer) { return limit_s < offer.limit_s; });
    const Way& way = *(too_long == offers[place].begin() ? too_long : std::prev(too_long))->way;
    if (!is_ring(batch_.problem, batch_.length(place), way.degree)) break;
    visit(place, way);
  }
}

std::vector<Way> Menu::choose(const Taste& taste, double makespan_s) const {
  std::vector<Way> chosen;
  choose(offers(taste), taste.share * makespan_s,
         [&](std::size_t, const Way& way) { chosen.push_back(way); });
  return chosen;
}

double Menu::least_makespan_s(const Taste& taste) const {
  constexpr int kSteps = 14;
  const std::vector<std::vector<Offer>> offered = offers(taste);
  const auto is_enough = [&](double makespan_s) {
    double work = batch_.total_s;
    double longest_s = taste.part_s;
    double slowest_s = 0;
    choose(offered, taste.share * makespan_s, [&](std::size_t place, const Way& way) {
      work += static_cast<double>(way.degree) * way.seconds - compute_s_[place];
      longest_s = std::max(longest_s, way.part_s);
      slowest_s = std::max(slowest_s, way.pass_s);
    });
    // with the ramp of each rank
    const double lost_s = taste.lost_s + taste.ramp * (longest_s - taste.part_s);
    return slowest_s <= makespan_s &&
           work + batch_.total_speed * lost_s <= makespan_s * batch_.total_speed;
  };
  double low = batch_.share_s;
  double high = 2 * low;
  while (!is_enough(high) && high < 1e3 * low) {
    low = high;
    high *= 2;
  }
  for (int step = 0; step < kSteps; ++step) {
    const double middle = (low + high) / 2;
    (is_enough(middle) ? high : low) = middle;
  }
  return high;
}

double ring_seconds(const Batch& batch, std::size_t place, const Way& way,
                    const std::vector<int32_t>& ring) {
  const Problem& problem = batch.problem;
  const Links links = links_of(problem.cost, {ring.data(), ring.data() + ring.size()});
  double speed = kInfinity;
  for (const int32_t rank : ring) speed = std::min(speed, problem.speed(rank));
  if (speed == 1 && links == way.links) return way.seconds;
  const auto length = static_cast<double>(batch.length(place));
  const std::vector<PartSize> sizes = part_sizes({length}, way.num_parts, problem.linear_tokens);
  return sequence_s(problem, batch.length(place), way.degree, sizes, links, speed);
}

double parts_of_ramp(const Problem& problem) {
  return static_cast<double>(problem.pipeline_stages - 1) / static_cast<double>(problem.model_chunks);
}

int64_t parts_of_pack(const Problem& problem, double seconds, double part_s) {
  const CostModel& cost = problem.cost;
  const double one_s = fixed_s(cost, 1) + cost.block_all_layers_s;
  const double wanted =
      std::min(std::ceil(seconds / part_s), std::sqrt(parts_of_ramp(problem) * seconds / one_s));
  // the negated form sends parts that cost nothing to the most
  if (!(wanted < static_cast<double>(problem.sequence_parts))) return problem.sequence_parts;
  return std::max<int64_t>(1, static_cast<int64_t>(wanted));
}

}  // namespace hdp
