// Translates between numpy and the planner; decides nothing.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
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
  result["stream_parts"] = py::none();
  if (!plan.stream_parts.empty()) {
    result["stream_parts"] = widened<int64_t>(plan.stream_parts, num_micro_batches, int32_t{0});
  }
  result["recomputed"] = py::none();
  if (!plan.recomputed.empty()) {
    std::vector<int32_t> numbers(plan.recomputed.begin(), plan.recomputed.end());
    result["recomputed"] = widened<int64_t>(numbers, num_micro_batches, int32_t{0});
  }
  result["positions"] = py::none();
  if (!plan.positions.empty()) result["positions"] = widened(plan.positions);
  result["num_parts"] = py::none();
  if (!plan.num_parts.empty()) result["num_parts"] = widened(plan.num_parts);
  result["makespan_s"] = answer.schedule.makespan_s;
  result["lower_bound_s"] = answer.lower_bound_s;
  result["perfect_s"] = answer.perfect_s;
  result["ring_tokens"] = answer.schedule.ring_tokens;
  result["max_tokens_on_a_rank"] = answer.schedule.max_tokens_on_a_rank;
  result["num_positions"] = answer.schedule.num_positions;
  result["padding_share"] = answer.schedule.padding_share;
  return result;
}

// Values by name: one that is missing, or that nobody takes, is an error.
class Fields {
 public:
  Fields(const char* of, const py::dict& given) : of_(of), left_(given.attr("copy")()) {}

  py::object take(const char* name) {
    if (left_.contains(name)) return left_.attr("pop")(name);
    throw std::invalid_argument(std::string(of_) + " lacks " + name);
  }

  template <typename T>
  void take(const char* name, T& field) {
    const py::object value = take(name);
    try {
      field = py::cast<T>(value);
    } catch (const py::cast_error&) {
      throw std::invalid_argument(std::string(name) + " is " +
                                  py::repr(value).cast<std::string>() + "; expected " +
                                  (std::is_integral_v<T> ? "an integer" : "a number"));
    }
  }

  // Call it when all fields are taken.
  void end() const {
    if (left_.empty()) return;
    const auto name = py::str(py::list(left_)[0]).cast<std::string>();
    throw std::invalid_argument(std::string(of_) + " has the unknown field " + name);
  }

 private:
  const char* of_;
  py::dict left_;
};

hdp::CostModel to_cost_model(const py::dict& given) {
  hdp::CostModel cost;
  Fields fields("the cost model", given);
  fields.take("a", cost.a);
  fields.take("linear_s_per_token", cost.linear_s_per_token);
  fields.take("g", cost.g);
  fields.take("kv_bytes_per_token", cost.kv_bytes_per_token);
  fields.take("intra_node_bytes_per_s", cost.intra_node_bytes_per_s);
  fields.take("inter_node_bytes_per_s", cost.inter_node_bytes_per_s);
  fields.take("ranks_per_node", cost.ranks_per_node);
  fields.take("activation_bytes_per_token", cost.activation_bytes_per_token);
  fields.take("host_bytes_per_s", cost.host_bytes_per_s);
  fields.take("num_layers", cost.num_layers);
  fields.take("attention_b", cost.attention_b);
  fields.take("block_all_layers_s", cost.block_all_layers_s);
  fields.take("intra_node_hop_all_layers_s", cost.intra_node_hop_all_layers_s);
  fields.take("inter_node_hop_all_layers_s", cost.inter_node_hop_all_layers_s);
  fields.take("merge_b", cost.merge_b);
  fields.take("b_experts", cost.b_experts);
  fields.take("window_tokens", cost.window_tokens);
  fields.take("window_share", cost.window_share);
  fields.take("halo_s", cost.halo_s);
  fields.take("query_ratio", cost.query_ratio);
  fields.take("input_share", cost.input_share);
  fields.take("double_rings", cost.double_rings);
  fields.take("projection_b", cost.projection_b);
  fields.take("made_bytes_per_token", cost.made_bytes_per_token);
  fields.take("sum_ratio", cost.sum_ratio);
  const py::object lengths = fields.take("attention_lengths");
  cost.attention = to_table(lengths, fields.take("attention_seconds"));
  fields.end();
  return cost;
}

hdp::Problem to_problem(const py::kwargs& given) {
  hdp::Problem problem;
  Fields fields("the problem", given);
  problem.lengths = to_lengths("lengths", fields.take("lengths"));
  fields.take("num_ranks", problem.num_ranks);
  fields.take("tokens_per_rank", problem.tokens_per_rank);
  fields.take("slice_multiple", problem.slice_multiple);
  fields.take("max_length", problem.max_length);
  fields.take("pipeline_stages", problem.pipeline_stages);
  fields.take("model_chunks", problem.model_chunks);
  problem.row_weights = to_numbers("row_weights", fields.take("row_weights"));
  fields.take("offload", problem.offload);
  fields.take("host_memory_bytes", problem.host_memory_bytes);
  fields.take("streams", problem.streams);
  fields.take("recompute", problem.recompute);
  fields.take("effort", problem.effort);
  fields.take("sequence_parts", problem.sequence_parts);
  fields.take("linear_tokens", problem.linear_tokens);
  fields.take("expert_ranks", problem.expert_ranks);
  problem.speeds = to_numbers("rank_speeds", fields.take("rank_speeds"));
  problem.cost = to_cost_model(py::cast<py::dict>(fields.take("cost_model")));
  fields.end();
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

// The makespan of any plan, for tests.
double makespan_s(const hdp::Problem& problem, const py::kwargs& given) {
  Fields fields("the plan", given);
  hdp::Plan plan;
  const auto take = [&](const char* name, auto& values) {
    values = py::cast<std::remove_reference_t<decltype(values)>>(fields.take(name));
  };
  take("rank_offsets", plan.rank_offsets);
  take("ranks", plan.ranks);
  take("sequence_offsets", plan.sequence_offsets);
  take("sequences", plan.sequences);
  take("local_offsets", plan.local_offsets);
  take("local_sequences", plan.locals.sequences);
  take("local_ranks", plan.locals.ranks);
  take("num_parts", plan.num_parts);
  take("recomputed", plan.recomputed);
  take("stream_parts", plan.stream_parts);
  fields.end();
  return hdp::simulate(problem, plan).makespan_s;
}

}  // namespace

PYBIND11_MODULE(_core, module, py::mod_gil_not_used()) {
  module.doc() = "The C++ planner.";
  module.attr("STRATEGIES") = py::tuple(py::cast(hdp::strategies()));
  py::class_<hdp::Problem>(module, "Problem").def(py::init(&to_problem));
  module.def("plan", &plan, py::arg("problem"), py::arg("strategy"));
  module.def("makespan_s", &makespan_s, py::arg("problem"));
  module.def("tight_bound_s", &hdp::checked_tight_bound_s, py::arg("problem"),
             py::call_guard<py::gil_scoped_release>());
}
