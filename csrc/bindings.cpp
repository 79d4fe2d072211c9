// Translates between numpy and the planner; decides nothing.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "planner/planner.hpp"

namespace py = pybind11;

namespace {

std::vector<int64_t> to_lengths(const py::array& array) {
  if (!array.dtype().is(py::dtype::of<int64_t>()) || array.ndim() != 1) {
    throw std::invalid_argument("lengths has dtype " + py::str(array.dtype()).cast<std::string>() +
                                " and " + std::to_string(array.ndim()) +
                                " dimensions; expected int64 and 1");
  }
  const auto values = py::cast<py::array_t<int64_t, py::array::c_style>>(array);
  return {values.data(), values.data() + values.size()};
}

std::vector<double> to_speeds(const py::array& array) {
  if (!array.dtype().is(py::dtype::of<double>()) || array.ndim() != 1) {
    throw std::invalid_argument(
        "rank_speeds has dtype " + py::str(array.dtype()).cast<std::string>() + " and " +
        std::to_string(array.ndim()) + " dimensions; expected float64 and 1");
  }
  const auto values = py::cast<py::array_t<double, py::array::c_style>>(array);
  return {values.data(), values.data() + values.size()};
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

py::dict to_dict(hdp::Answer& answer) {
  py::dict result;
  result["rank_offsets"] = to_numpy(answer.plan.rank_offsets);
  result["ranks"] = to_numpy(answer.plan.ranks);
  result["sequence_offsets"] = to_numpy(answer.plan.sequence_offsets);
  result["sequences"] = to_numpy(answer.plan.sequences);
  result["local_offsets"] = to_numpy(answer.plan.local_offsets);
  result["local_sequences"] = to_numpy(answer.plan.local_sequences);
  result["local_ranks"] = to_numpy(answer.plan.local_ranks);
  result["offload_ratios"] = to_numpy(answer.plan.offload_ratios);
  result["makespan_s"] = answer.schedule.makespan_s;
  result["lower_bound_s"] = answer.lower_bound_s;
  result["perfect_s"] = answer.perfect_s;
  result["ring_tokens"] = answer.schedule.ring_tokens;
  result["max_tokens_on_a_rank"] = answer.schedule.max_tokens_on_a_rank;
  return result;
}

hdp::Problem to_problem(const py::array& lengths, int64_t num_ranks, int64_t tokens_per_rank,
                        int64_t slice_multiple, int64_t max_length, double a, double b, double g,
                        double kv_bytes_per_token, double intra_node_bytes_per_s,
                        double inter_node_bytes_per_s, int64_t ranks_per_node,
                        double activation_bytes_per_token, double host_bytes_per_s,
                        int64_t num_layers, const py::array& rank_speeds, int64_t pipeline_stages,
                        bool offload, int64_t effort) {
  hdp::Problem problem;
  problem.lengths = to_lengths(lengths);
  problem.num_ranks = num_ranks;
  problem.tokens_per_rank = tokens_per_rank;
  problem.slice_multiple = slice_multiple;
  problem.max_length = max_length;
  problem.pipeline_stages = pipeline_stages;
  problem.offload = offload;
  problem.effort = effort;
  problem.speeds = to_speeds(rank_speeds);
  problem.cost = {a,
                  b,
                  g,
                  kv_bytes_per_token,
                  intra_node_bytes_per_s,
                  inter_node_bytes_per_s,
                  ranks_per_node,
                  activation_bytes_per_token,
                  host_bytes_per_s,
                  num_layers};
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
           py::arg("host_bytes_per_s"), py::arg("num_layers"), py::arg("rank_speeds"),
           py::arg("pipeline_stages"), py::arg("offload"), py::arg("effort"));
  module.def("plan", &plan, py::arg("problem"), py::arg("strategy"));
  module.def("tight_bound_s", &hdp::checked_tight_bound_s, py::arg("problem"),
             py::call_guard<py::gil_scoped_release>());
}
