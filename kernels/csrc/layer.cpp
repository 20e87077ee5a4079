// The elastic layers of this process, and the operator of torch that stands for each of them where
// torch.compile traces. Its schema is Python's: other devices implement it too.
#include "layer.h"

#include <torch/library.h>

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace dps {
namespace {

// By the address of the residual. A layer that is found stays until its call has ended: another
// thread may let it go meanwhile.
class Layers {
 public:
  void add(uintptr_t address, const std::shared_ptr<ElasticLinear>& layer) {
    const std::unique_lock lock(mutex_);
    by_address_[address] = layer;
  }

  std::shared_ptr<ElasticLinear> find(uintptr_t address) {
    const std::shared_lock lock(mutex_);
    const auto found = by_address_.find(address);
    return found == by_address_.end() ? nullptr : found->second.lock();
  }

  // Unless another layer has taken the place: memory is used again.
  void drop(uintptr_t address) {
    const std::unique_lock lock(mutex_);
    const auto found = by_address_.find(address);
    if (found != by_address_.end() && found->second.expired()) by_address_.erase(found);
  }

 private:
  std::shared_mutex mutex_;
  std::unordered_map<uintptr_t, std::weak_ptr<ElasticLinear>> by_address_;
};

// Never destroyed: layers may go after the library's statics.
Layers& layers() {
  static Layers& all = *new Layers;
  return all;
}

uintptr_t address_of(const Tensor& residual) {
  return reinterpret_cast<uintptr_t>(residual.const_data_ptr());
}

Tensor elastic_linear(const Tensor& x, const Tensor& residual, const std::optional<Tensor>& bias) {
  const auto layer = layers().find(address_of(residual));
  TORCH_CHECK(layer, "residual: no elastic layer begins at this address; it must "
              "be the lower plane that the layer was prepared with");
  return (*layer)(x, bias);
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
      address_(address_of(full.weight().lower.value())) {}

ElasticLinear::~ElasticLinear() { layers().drop(address_); }

std::shared_ptr<ElasticLinear> ElasticLinear::make(const Linear& full,
                                                   std::shared_ptr<Access> access) {
  const std::shared_ptr<ElasticLinear> layer(new ElasticLinear(full, std::move(access)));
  layers().add(layer->address_, layer);
  return layer;
}

}  // namespace dps

TORCH_LIBRARY_IMPL(dps_kernels, CPU, m) { m.impl("elastic_linear", dps::elastic_linear); }
