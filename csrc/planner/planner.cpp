#include "planner/planner.hpp"

#include <stdexcept>
#include <utility>

#include "planner/base/cost_model.hpp"
#include "planner/baselines/baselines.hpp"
#include "planner/bounds/bounds.hpp"
#include "planner/dp_balance/dp_balance.hpp"
#include "planner/ep_balance/ep_balance.hpp"
#include "planner/pp_balance/pp_balance.hpp"
#include "planner/round_balance/round_balance.hpp"
#include "planner/schedule/schedule.hpp"

namespace hdp {
namespace {

// In parts where they help. Where ranks share experts, with the time of ranks that wait for each
// other at every position.
Scheduled judged(const Problem& problem, Plan plan) {
  if (plan.num_parts.empty()) {
    choose_parts(problem, plan);
  } else {
    equalize_parts(problem, plan);
  }
  if (problem.expert_ranks == 1 || problem.pipeline_stages > 1) {
    return scheduled(problem, std::move(plan));
  }
  const Schedule schedule = simulate_lockstep(problem, plan);
  return {std::move(plan), schedule};
}

template <Plan (*strategy)(const Problem&)>
Scheduled judged_plan(const Problem& problem) {
  return judged(problem, strategy(problem));
}

Scheduled judged_dp_balance(const Problem& problem) {
  Scheduled made = dp_balance(problem);
  return problem.expert_ranks == 1 ? made : judged(problem, std::move(made.plan));
}

struct Strategy {
  const char* name;
  Scheduled (*plan)(const Problem&);
};

// Every strategy; megatron_hdp/strategies.py says of each what it is.
constexpr Strategy kStrategies[] = {
    {"static", judged_plan<static_mesh>},    {"naive", judged_plan<naive>},
    {"bytescale", judged_plan<bytescale>},   {"dynamic-cp", judged_plan<dynamic_cp>},
    {"round-balance", judged_plan<round_balance>},
    {"dp-balance", judged_dp_balance},       {"pp-balance", judged_plan<pp_balance>},
    {"ep-balance", judged_plan<ep_balance>},
};

Scheduled run(const Problem& problem, const std::string& strategy) {
  std::string names;
  for (const Strategy& known : kStrategies) {
    if (strategy == known.name) return known.plan(problem);
    names += std::string(names.empty() ? "" : ", ") + known.name;
  }
  throw std::invalid_argument("strategy is '" + strategy + "'; expected one of " + names);
}

}  // namespace

std::vector<std::string> strategies() {
  std::vector<std::string> names;
  for (const Strategy& known : kStrategies) names.emplace_back(known.name);
  return names;
}

Answer make_plan(const Problem& given, const std::string& strategy) {
  Problem problem = given;
  // the others know none
  const bool shares_experts = given.expert_ranks > 1;
  const bool is_balanced = strategy == "dp-balance" || strategy == "pp-balance";
  const bool knows_streams = shares_experts ? strategy == "ep-balance" : is_balanced;
  problem.streams = given.streams && (knows_streams || strategy == "static");
  problem.recompute = given.recompute && is_balanced;
  check(problem);
  Answer answer;
  Scheduled made = run(problem, strategy);
  answer.plan = std::move(made.plan);
  answer.schedule = made.schedule;
  answer.perfect_s = total_compute_s(problem) / total_speed(problem);
  // a sequence's own time is less where others compute its experts
  answer.lower_bound_s = problem.expert_ranks > 1 ? answer.perfect_s : lower_bound_s(problem);
  return answer;
}

double checked_tight_bound_s(const Problem& problem) {
  check(problem);
  return tight_bound_s(problem);
}

}  // namespace hdp
