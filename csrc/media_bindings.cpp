// Translates between numpy and the planner of items; decides nothing.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "media/items.hpp"

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

template <typename T>
std::vector<T> to_vector(const Array<T>& array) {
  return {array.data(), array.data() + array.size()};
}

template <typename T>
py::array_t<T> to_numpy(const std::vector<T>& values) {
  return py::array_t<T>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::tuple plan_items(const Array<int64_t>& patches, const Array<int32_t>& consumers,
                     const Array<double>& speeds, const Array<double>& busy_s,
                     double free_s, int64_t ranks_per_node, int64_t most_ranks, int64_t patches_per_row,
                     int64_t patches_per_pack, double patch_s, double patch2_s, double pack_s,
                     double gathered_s_per_patch) {
  hdp::ItemProblem problem{to_vector(patches), to_vector(consumers), to_vector(speeds),
                           to_vector(busy_s),  free_s,               ranks_per_node,
                           most_ranks,         patches_per_row,      patches_per_pack,
                           {patch_s, patch2_s, pack_s, gathered_s_per_patch}};
  hdp::ItemPlan plan;
  {
    const py::gil_scoped_release release;
    plan = hdp::plan_items(problem);
  }
  return py::make_tuple(to_numpy(plan.first_ranks), to_numpy(plan.degrees), to_numpy(plan.turns));
}

}  // namespace

PYBIND11_MODULE(_items, module, py::mod_gil_not_used()) {
  module.doc() = "Plans which ranks encode which items.";
  module.def("plan_items", &plan_items, py::arg("patches"), py::arg("consumers"),
             py::arg("speeds"), py::arg("busy_s"), py::arg("free_s"), py::kw_only(), py::arg("ranks_per_node"),
             py::arg("most_ranks"), py::arg("patches_per_row"), py::arg("patches_per_pack"),
             py::arg("patch_s"), py::arg("patch2_s"), py::arg("pack_s"),
             py::arg("gathered_s_per_patch"));
}
