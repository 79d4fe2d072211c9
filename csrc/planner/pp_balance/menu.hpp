// pp-balance in parts: on how many ranks and in how many parts each long sequence may run.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/rings/batch.hpp"

namespace hdp {

// One way to run a sequence.
struct Way {
  int32_t degree = 1;
  int32_t num_parts = 1;
  double seconds = 0;  // of a member, all stages and parts
  double part_s = 0;   // the longest of them, all stages
  double pass_s = 0;   // P times what a pass of all stages takes, if no one else is in the way
  Links links;         // that are expected

  bool operator==(const Way& other) const {
    return degree == other.degree && num_parts == other.num_parts && seconds == other.seconds;
  }
};

// What decides between the ways of a sequence.
struct Taste {
  double ramp = 0;    // what a part takes longer than part_s counts so often: at most parts_of_ramp
  double part_s = 0;  // that a part should take, all stages
  double share = 1;   // of the makespan that a pass may take
  double lost_s = 0;  // what a rank loses where no part takes longer than part_s
};

// The ways of all sequences that may become rings, longest first.
class Menu {
 public:
  // Rings that leave their node are expected on whole nodes where rings are double; else, on any
  // ranks.
  Menu(const Batch& batch, bool whole_nodes);

  // The way of each ring, of the longest sequences first; P times the makespan is `makespan_s`.
  std::vector<Way> choose(const Taste& taste, double makespan_s) const;

  // The least P x makespan at which all passes are short enough and the ranks have time for all.
  double least_makespan_s(const Taste& taste) const;

 private:
  // A way, the cheapest to a taste of those whose pass takes no longer than its limit.
  struct Offer {
    double limit_s = 0;
    const Way* way = nullptr;
  };

  // By place, ascending limits; the first also serves where all passes take too long.
  std::vector<std::vector<Offer>> offers(const Taste& taste) const;

  // Calls visit(place, way) for each ring whose pass may take most_s.
  template <typename Visit>
  void choose(const std::vector<std::vector<Offer>>& offers, double most_s,
              const Visit& visit) const;

  const Batch& batch_;
  std::vector<std::vector<Way>> ways_;                // by place
  std::vector<std::vector<std::size_t>> by_pass_;     // by place: its ways, the fastest first
  std::vector<double> compute_s_;                     // by place
};

// Seconds of the slowest member, all stages and parts, of a sequence that runs in a way on this ring.
double ring_seconds(const Batch& batch, std::size_t place, const Way& way,
                    const std::vector<int32_t>& ring);

// So many parts pass a stage before the first one has passed all: (P - 1) / V.
double parts_of_ramp(const Problem& problem);

// In how many parts a micro-batch of one rank should run, of `seconds` if it runs whole, so that
// parts take part_s, if launches do not cost more than that saves.
int64_t parts_of_pack(const Problem& problem, double seconds, double part_s);

}  // namespace hdp
