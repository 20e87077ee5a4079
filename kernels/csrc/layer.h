// Products that keep their weights: of one mode, and of both behind one call.
#pragma once
#include <unordered_set>
#include <utility>

#include "binding.h"

namespace dps {

struct Planes {
  Tensor upper;
  std::optional<Tensor> lower;
  bool e5m2;
  std::optional<Tensor> row_shift;
};

class Linear {
 public:
  Linear(bool packed, Planes w) : run_(packed ? linear_packed : linear), w_(std::move(w)) {}

  const Planes& weight() const { return w_; }

  // The same product of another weight.
  Linear with(Planes w) const {
    Linear other = *this;
    other.w_ = std::move(w);
    return other;
  }

  Tensor operator()(const Tensor& x, const std::optional<Tensor>& bias) const {
    return run_(x, w_.upper, w_.lower, w_.e5m2, w_.row_shift, bias);
  }

 private:
  decltype(&linear) run_;
  Planes w_;
};

// Which residual weights the running step may read, by the address they begin at. Changed between
// steps alone, by the thread that runs them.
struct Access {
  bool all = false;
  std::unordered_set<uintptr_t> addresses;

  bool may_read(uintptr_t address) const { return all || addresses.count(address); }
};

// A layer in both modes. While it lives, the operator `dps_kernels::elastic_linear` finds it by the
// address of its residual.
class ElasticLinear {
 public:
  static std::shared_ptr<ElasticLinear> make(const Linear& full, std::shared_ptr<Access> access);
  ~ElasticLinear();
  ElasticLinear(const ElasticLinear&) = delete;
  ElasticLinear& operator=(const ElasticLinear&) = delete;

  Tensor operator()(const Tensor& x, const std::optional<Tensor>& bias) const {
    return (access_->may_read(address_) ? full_ : fast_)(x, bias);
  }

 private:
  ElasticLinear(const Linear& full, std::shared_ptr<Access> access);

  Linear full_, fast_;
  std::shared_ptr<Access> access_;
  uintptr_t address_;
};

}  // namespace dps
