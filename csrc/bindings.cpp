// Translates between numpy and the planner; decides nothing.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "planner/planner.hpp"

namespace py = pybind11;

namespace {

using Int64Array = py::array_t<int64_t, py::array::c_style>;

template <typename T>
void check_array(const char* name, const py::array& array, const char* dtype) {
  if (array.dtype().is(py::dtype::of<T>()) && array.ndim() == 1) return;
  throw std::invalid_argument(std::string(name) + " has dtype " +
                              py::str(array.dtype()).cast<std::string>() + " and " +
                              std::to_string(array.ndim()) + " dimensions; expected " + dtype +
                              " and 1");
}

// A view of the array, which is kept as long as it is looked at.
hdp::Lengths to_lengths(const char* name, const py::array& array) {
  check_array<int64_t>(name, array, "int64");
  const auto kept = std::make_shared<const Int64Array>(py::cast<Int64Array>(array));
  return {kept->data(), static_cast<std::size_t>(kept->size()), kept};
}

std::vector<double> to_numbers(const char* name, const py::array& array) {
  check_array<double>(name, array, "float64");
  const auto values = py::cast<py::array_t<double, py::array::c_style>>(array);
  return {values.data(), values.data() + values.size()};
}

hdp::AttentionTable to_table(const py::array& lengths, const py::array& seconds) {
  const hdp::Lengths found = to_lengths("attention_lengths", lengths);
  const std::vector<double> times = to_numbers("attention_seconds", seconds);
  if (found.size() != times.size()) {
    throw std::invalid_argument("attention_lengths has " + std::to_string(found.size()) +
                                " entries and attention_seconds " + std::to_string(times.size()) +
                                "; expected as many of both");
  }
  std::vector<hdp::AttentionPoint> points;
  for (std::size_t i = 0; i < times.size(); ++i) points.push_back({found[i], times[i]});
  return hdp::AttentionTable(std::move(points));
}

// Hands the values over without a copy; nobody may change them.
template <typename T>
py::array_t<T> to_numpy(std::vector<T>& values) {
  auto owned = std::make_unique<std::vector<T>>(std::move(values));
  const py::capsule owner(owned.get(),
                          [](void* kept) { delete static_cast<std::vector<T>*>(kept); });
  const std::vector<T>& kept = *owned.release();
  py::array_t<T> array(static_cast<py::ssize_t>(kept.size()), kept.data(), owner);
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

// So many values: the given ones, which are gone then, and behind them others that are alike. Zeros
// there take no memory.
template <typename To, typename From>
py::array_t<To> widened(std::vector<From>& values, std::size_t size, From others) {
  const py::object zeros = py::module_::import("numpy").attr("zeros");
  py::array_t<To> array = zeros(size, py::dtype::of<To>());
  To* next = array.mutable_data();
  for (const From value : values) *next++ = static_cast<To>(value);
  if (others != 0) std::fill(next, array.mutable_data() + size, static_cast<To>(others));
  std::vector<From>().swap(values);
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

py::array_t<int64_t> widened(std::vector<int32_t>& values) {
  return widened<int64_t>(values, values.size(), int32_t{0});
}

py::dict to_dict(hdp::Answer& answer) {
  hdp::Plan& plan = answer.plan;
  const auto num_micro_batches = static_cast<std::size_t>(plan.num_micro_batches());
  py::dict result;
  result["sequences"] = widened(plan.sequences);
  result["sequence_offsets"] = widened(plan.sequence_offsets);
  result["rank_offsets"] = widened(plan.rank_offsets);
  result["ranks"] = to_numpy(plan.ranks);
  const int32_t num_locals = plan.local_offsets.back();
  result["local_offsets"] = widened<int64_t>(plan.local_offsets, num_micro_batches + 1, num_locals);
  result["local_sequences"] = widened(plan.locals.sequences);
  result["local_ranks"] = to_numpy(plan.locals.ranks);
  result["offload_ratios"] = widened<double>(plan.offload_ratios, num_micro_batches, 0.0);
  result["positions"] = py::none();
  if (!plan.positions.empty()) result["positions"] = widened(plan.positions);
  result["makespan_s"] = answer.schedule.makespan_s;
  result["lower_bound_s"] = answer.lower_bound_s;
  result["perfect_s"] = answer.perfect_s;
  result["ring_tokens"] = answer.schedule.ring_tokens;
  result["max_tokens_on_a_rank"] = answer.schedule.max_tokens_on_a_rank;
  result["num_positions"] = answer.schedule.num_positions;
  result["padding_share"] = answer.schedule.padding_share;
  return result;
}

hdp::Problem to_problem(const py::array& lengths, int64_t num_ranks, int64_t tokens_per_rank,
                        int64_t slice_multiple, int64_t max_length, double a, double b, double g,
                        double kv_bytes_per_token, double intra_node_bytes_per_s,
                        double inter_node_bytes_per_s, int64_t ranks_per_node,
                        double activation_bytes_per_token, double host_bytes_per_s,
                        int64_t num_layers, double attention_b, double block_s,
                        double intra_node_hop_s, double inter_node_hop_s, double merge_b,
                        int64_t window_tokens, double window_share, double halo_s,
                        const py::array& attention_lengths, const py::array& attention_seconds,
                        const py::array& rank_speeds, int64_t pipeline_stages, int64_t model_chunks,
                        const py::array& row_weights, bool offload, int64_t effort,
                        double b_experts, int64_t expert_ranks) {
  hdp::Problem problem;
  problem.lengths = to_lengths("lengths", lengths);
  problem.num_ranks = num_ranks;
  problem.tokens_per_rank = tokens_per_rank;
  problem.slice_multiple = slice_multiple;
  problem.max_length = max_length;
  problem.pipeline_stages = pipeline_stages;
  problem.model_chunks = model_chunks;
  problem.row_weights = to_numbers("row_weights", row_weights);
  problem.offload = offload;
  problem.effort = effort;
  problem.speeds = to_numbers("rank_speeds", rank_speeds);
  problem.cost = {a,
                  b,
                  g,
                  kv_bytes_per_token,
                  intra_node_bytes_per_s,
                  inter_node_bytes_per_s,
                  ranks_per_node,
                  activation_bytes_per_token,
                  host_bytes_per_s,
                  num_layers,
                  to_table(attention_lengths, attention_seconds),
                  attention_b,
                  block_s,
                  intra_node_hop_s,
                  inter_node_hop_s,
                  merge_b,
                  b_experts,
                  window_tokens,
                  window_share,
                  halo_s};
  problem.expert_ranks = expert_ranks;
  return problem;
}

py::dict plan(const hdp::Problem& problem, const std::string& strategy) {
  hdp::Answer answer;
  {
    const py::gil_scoped_release release;
    answer = hdp::make_plan(problem, strategy);
  }
  return to_dict(answer);
}

}  // namespace

PYBIND11_MODULE(_core, module, py::mod_gil_not_used()) {
  module.doc() = "The C++ planner.";
  py::class_<hdp::Problem>(module, "Problem")
      .def(py::init(&to_problem), py::arg("lengths"), py::kw_only(), py::arg("num_ranks"),
           py::arg("tokens_per_rank"), py::arg("slice_multiple"), py::arg("max_length"),
           py::arg("a"), py::arg("b"), py::arg("g"), py::arg("kv_bytes_per_token"),
           py::arg("intra_node_bytes_per_s"), py::arg("inter_node_bytes_per_s"),
           py::arg("ranks_per_node"), py::arg("activation_bytes_per_token"),
           py::arg("host_bytes_per_s"), py::arg("num_layers"), py::arg("attention_b"),
           py::arg("block_s"), py::arg("intra_node_hop_s"), py::arg("inter_node_hop_s"),
           py::arg("merge_b"), py::arg("window_tokens"), py::arg("window_share"),
           py::arg("halo_s"), py::arg("attention_lengths"), py::arg("attention_seconds"),
           py::arg("rank_speeds"), py::arg("pipeline_stages"), py::arg("model_chunks"),
           py::arg("row_weights"), py::arg("offload"), py::arg("effort"), py::arg("b_experts"), py::arg("expert_ranks"));
  module.def("plan", &plan, py::arg("problem"), py::arg("strategy"));
  module.def("tight_bound_s", &hdp::checked_tight_bound_s, py::arg("problem"),
             py::call_guard<py::gil_scoped_release>());
}
