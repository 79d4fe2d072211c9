// Translates between numpy and the order of an epoch; decides nothing.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "data/epoch_order.hpp"

namespace py = pybind11;

namespace {

py::array_t<int64_t> epoch_rows(int64_t first, int64_t count, int64_t num_rows, uint64_t seed,
                                uint64_t source, uint64_t epoch) {
  std::vector<int64_t> rows;
  {
    const py::gil_scoped_release release;
    rows = hdp::EpochOrder(num_rows, seed, source, epoch).rows(first, count);
  }
  return py::array_t<int64_t>(static_cast<py::ssize_t>(rows.size()), rows.data());
}

}  // namespace

PYBIND11_MODULE(_order, module, py::mod_gil_not_used()) {
  module.doc() = "The order of an epoch.";
  module.def("epoch_rows", &epoch_rows, py::arg("first"), py::arg("count"), py::kw_only(),
             py::arg("num_rows"), py::arg("seed"), py::arg("source"), py::arg("epoch"));
}
