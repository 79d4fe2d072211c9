// Translates between numpy and the order of the data; decides nothing.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "data/epoch_order.hpp"
#include "data/mixing.hpp"

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

using Int64s = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

py::tuple mix(const std::vector<double>& weights, std::vector<double> owed, const Int64s& lengths,
              const Int64s& amounts, std::vector<int64_t> first, std::vector<int64_t> used,
              int64_t sequences, int64_t tokens, bool must_take) {
  if (lengths.ndim() != 1 || amounts.ndim() != 1 || lengths.size() != amounts.size() ||
      first.empty() || first.back() != lengths.size()) {
    throw std::invalid_argument(
        "found lengths, amounts and ends of sources that do not "
        "belong together");
  }
  hdp::Ready ready{lengths.data(), amounts.data(), std::move(first), std::move(used)};
  hdp::Mixed mixed;
  {
    const py::gil_scoped_release release;
    mixed = hdp::mix(weights, owed, ready, {sequences, tokens, must_take});
  }
  const auto count = static_cast<py::ssize_t>(mixed.sources.size());
  const py::array_t<int32_t> sources(count, mixed.sources.data());
  const py::array_t<int64_t> turns(count, mixed.turns.data());
  return py::make_tuple(sources, turns, owed, ready.used, mixed.source);
}

}  // namespace

PYBIND11_MODULE(_order, module, py::mod_gil_not_used()) {
  module.doc() = "The order of an epoch, and of sources.";
  module.def("epoch_rows", &epoch_rows, py::arg("first"), py::arg("count"), py::kw_only(),
             py::arg("num_rows"), py::arg("seed"), py::arg("source"), py::arg("epoch"));
  module.def("mix", &mix, py::arg("weights"), py::arg("owed"), py::arg("lengths"),
             py::arg("amounts"), py::arg("first"), py::arg("used"), py::kw_only(),
             py::arg("sequences"), py::arg("tokens"), py::arg("must_take"));
}
