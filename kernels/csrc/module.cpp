// The Python module `dps_kernels._C`. Plain Python callables, not operators of torch: the
// dispatcher reads and checks every argument of a call, by code that is cold once a layer's weights
// have passed through the caches. So a product keeps its weights, and a call takes activations
// alone. None of them can be traced: what torch.compile sees is the operator of layer.cpp, and the
// engine's own for experts.
#include <torch/csrc/utils/pybind.h>

#include "layer.h"

namespace {

namespace py = pybind11;
using at::Tensor;
using dps::Planes;

class Experts {
 public:
  Experts(bool packed, Planes w13, Planes w2)
      : run_(packed ? dps::moe_packed : dps::moe), w13_(std::move(w13)), w2_(std::move(w2)) {}

  Tensor operator()(const Tensor& x, const Tensor& topk_weights, const Tensor& topk_ids) const {
    return run_(x, w13_.upper, w13_.lower, w13_.e5m2, w13_.row_shift, w2_.upper, w2_.lower,
                w2_.e5m2, w2_.row_shift, topk_weights, topk_ids);
  }

 private:
  decltype(&dps::moe) run_;
  Planes w13_, w2_;
};

}  // namespace

PYBIND11_MODULE(_C, m) {
  // Other threads run Python meanwhile.
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Planes>(m, "Planes", py::module_local())
      .def(py::init<Tensor, std::optional<Tensor>, bool, std::optional<Tensor>>());
  py::class_<dps::Linear>(m, "Linear", py::module_local())
      .def(py::init<bool, Planes>())
      .def("__call__", &dps::Linear::operator(), Released());
  py::class_<dps::Access, std::shared_ptr<dps::Access>>(m, "Access", py::module_local())
      .def(py::init())
      .def_readwrite("all", &dps::Access::all)
      .def_readwrite("addresses", &dps::Access::addresses)
      .def("may_read", &dps::Access::may_read);
  py::class_<dps::ElasticLinear, std::shared_ptr<dps::ElasticLinear>>(m, "ElasticLinear", py::module_local())
      .def(py::init(&dps::ElasticLinear::make))
      .def("__call__", &dps::ElasticLinear::operator(), Released());
  py::class_<Experts>(m, "Experts", py::module_local())
      .def(py::init<bool, Planes, Planes>())
      .def("__call__", &Experts::operator(), Released());
  m.def("linear_16bit", dps::linear_16bit, Released());
  m.def("reconstruct", dps::reconstruct, Released());
  m.def("route", dps::route, Released());
  m.def("read_all", dps::read_all, Released());
  m.def("zero_all", dps::zero_all, Released());
  m.def("row_sums", dps::row_sums_of, Released());
  m.def("copy_rows", dps::copy_rows_of, Released());
  m.def("has_packed", [] { return dps::kernels().packed != nullptr; });
  m.def("isa", [] { return dps::kernels().name; });
}
