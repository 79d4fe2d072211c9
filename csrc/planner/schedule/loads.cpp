#include "planner/schedule/loads.hpp"

#include <algorithm>

#include "planner/base/cost_model.hpp"
#include "planner/base/slices.hpp"

namespace hdp {
namespace {

// Sequences of one member or of the whole ring.
struct Sum {
  double attention_s = 0;
  double compute_s = 0;
  double tokens = 0;
  int64_t slice_tokens = 0;

  void add(const Problem& problem, SequenceId id, int64_t degree) {
    const int64_t length = problem.lengths[index(id)];
    attention_s += hdp::attention_s(problem.cost, length);
    compute_s += hdp::compute_s(problem.cost, length);
    tokens += static_cast<double>(length);
    slice_tokens += hdp::slice_tokens(length, degree, problem.slice_multiple);
  }
};

// What the members of a ring do together.
class RingTime {
 public:
  RingTime(const Problem& problem, const Plan& plan, int64_t m)
      : problem_(problem),
        plan_(plan),
        first_(plan.rank_offsets[index(m)]),
        last_(plan.rank_offsets[index(m) + 1]) {
    for (auto i = plan.sequence_offsets[index(m)]; i < plan.sequence_offsets[index(m) + 1]; ++i) {
      sum_.add(problem, plan.sequences[index(i)], degree());
    }
    one_node_ = one_node();
  }

  int64_t degree() const { return last_ - first_; }
  const Sum& sum() const { return sum_; }

  // Seconds of a member that has `local_s` of its own sequences.
  double member_s(int32_t rank, double local_s) const {
    const auto d = static_cast<double>(degree());
    const double speed = problem_.speed(rank);
    const double exposed =
        exposed_s(problem_.cost, degree(), sum_.tokens, sum_.attention_s / d / speed, one_node_);
    const double overhead =
        fixed_s(problem_.cost, degree()) + merge_s(problem_.cost, degree(), sum_.tokens);
    return (sum_.compute_s / d + local_s + overhead) / speed + exposed;
  }

  // Seconds of the slowest member without locals.
  double slowest_s() const {
    if (problem_.speeds.empty()) return member_s(0, 0);
    double slowest = 0;
    for (auto i = first_; i < last_; ++i) {
      slowest = std::max(slowest, member_s(plan_.ranks[index(i)], 0));
    }
    return slowest;
  }

 private:
  bool one_node() const {
    const int64_t per_node = problem_.cost.ranks_per_node;
    const int64_t node = plan_.ranks[index(first_)] / per_node;
    return std::all_of(plan_.ranks.begin() + first_, plan_.ranks.begin() + last_,
                       [&](int32_t rank) { return rank / per_node == node; });
  }

  const Problem& problem_;
  const Plan& plan_;
  int64_t first_;
  int64_t last_;
  Sum sum_;
  bool one_node_ = true;
};

}  // namespace

MicroBatchLoad micro_batch_load(const Problem& problem, const Plan& plan, int64_t micro_batch) {
  const RingTime ring(problem, plan, micro_batch);
  const auto d = static_cast<double>(ring.degree());
  MicroBatchLoad load{ring.slowest_s(), (d - 1) * ring.sum().tokens, ring.sum().slice_tokens};
  Sum member;
  const int32_t last = plan.local_offset(micro_batch + 1);
  for (int32_t i = plan.local_offset(micro_batch); i < last; ++i) {
    const int32_t rank = plan.locals.ranks[index(i)];
    member.add(problem, plan.locals.sequences[index(i)], 1);
    if (i + 1 < last && plan.locals.ranks[index(i) + 1] == rank) continue;
    const double local_s = member.compute_s + problem.cost.block_all_layers_s;
    load.seconds = std::max(load.seconds, ring.member_s(rank, local_s));
    load.tokens_on_a_rank =
        std::max(load.tokens_on_a_rank, ring.sum().slice_tokens + member.slice_tokens);
    member = {};
  }
  return load;
}

}  // namespace hdp
