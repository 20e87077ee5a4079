// The elastic layers of this process, and the operator of torch that stands for each of them where
// torch.compile traces. Its schema is Python's: other devices implement it too.
#include "layer.h"

#include <torch/library.h>

#include <unordered_map>

namespace dps {
namespace {

// Layers come and go under Python's lock, and never while a step runs.
std::unordered_map<uintptr_t, const ElasticLinear*>& layers() {
  static std::unordered_map<uintptr_t, const ElasticLinear*> all;
  return all;
}

uintptr_t address_of(const Tensor& residual) {
  return reinterpret_cast<uintptr_t>(residual.const_data_ptr());
}

Tensor elastic_linear(const Tensor& x, const Tensor& residual, const std::optional<Tensor>& bias) {
  const auto found = layers().find(address_of(residual));
  TORCH_CHECK(found != layers().end(), "residual: no elastic layer begins at this address; it must "
              "be the lower plane that the layer was prepared with");
  return (*found->second)(x, bias);
}

Linear without_residual(const Linear& full) {
  Planes planes = full.weight();
  planes.lower.reset();
  return full.with(std::move(planes));
}

}  // namespace

ElasticLinear::ElasticLinear(const Linear& full, std::shared_ptr<Access> access)
    : full_(full),
      fast_(without_residual(full)),
      access_(std::move(access)),
      address_(address_of(full.weight().lower.value())) {
  layers()[address_] = this;
}

ElasticLinear::~ElasticLinear() {
  // Memory is used again: another layer may have taken the place.
  const auto found = layers().find(address_);
  if (found != layers().end() && found->second == this) layers().erase(found);
}

}  // namespace dps

TORCH_LIBRARY_IMPL(dps_kernels, CPU, m) { m.impl("elastic_linear", dps::elastic_linear); }
