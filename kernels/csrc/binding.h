// What the files that see torch's headers share.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <memory>
#include <new>
#include <optional>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "tasks.h"

namespace dps {

using at::Tensor;

// Byte planes of a nested weight [N, K] or [E, N, K].
struct NestedWeight {
  const Tensor& upper;
  const std::optional<Tensor>& lower;
  bool e5m2;
  const std::optional<Tensor>& row_shift;

  int64_t rows() const { return upper.size(-2); }
  int64_t columns() const { return upper.size(-1); }

  // What the memory accesses below rely on; the Python package explains what is wrong.
  void check(int64_t dimensions) const {
    TORCH_CHECK(upper.dim() == dimensions && upper.numel() > 0 && upper.is_contiguous(), "upper");
    TORCH_CHECK(!lower || (lower->sizes() == upper.sizes() && lower->is_contiguous()), "lower");
    TORCH_CHECK(upper.scalar_type() == at::kByte && (!lower || lower->scalar_type() == at::kByte) &&
                    (!row_shift || row_shift->scalar_type() == at::kChar),
                "dtypes");
    TORCH_CHECK(!row_shift || (row_shift->numel() == upper.numel() / columns() &&
                               row_shift->is_contiguous()),
                "row_shift");
  }

  // One matrix, from a row on.
  Weight matrix(int64_t index = 0, int64_t row = 0) const {
    const int64_t start = (index * rows() + row) * columns();
    const Codec codec = e5m2 ? (lower ? Codec::E5m2Full : Codec::E5m2Fast)
                             : (lower ? Codec::E4m3Full : Codec::E4m3Fast);
    return {codec, upper.const_data_ptr<uint8_t>() + start,
            lower ? lower->const_data_ptr<uint8_t>() + start : nullptr,
            row_shift ? row_shift->const_data_ptr<int8_t>() + index * rows() + row : nullptr, columns()};
  }
};

inline void check_linear(const Tensor& x, int64_t rows, int64_t columns,
                         const std::optional<Tensor>& bias) {
  TORCH_CHECK(x.dim() > 0 && x.size(-1) == columns, "x");
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == rows), "bias");
}

inline void check_moe(const Tensor& x, const NestedWeight& w13, const NestedWeight& w2,
                      const Tensor& topk_weights, const Tensor& topk_ids) {
  w13.check(3);
  w2.check(3);
  TORCH_CHECK(w13.rows() == 2 * w2.columns() && w13.columns() == w2.rows() &&
                  w13.upper.size(0) == w2.upper.size(0),
              "w2");
  TORCH_CHECK(x.dim() == 2 && x.size(1) == w13.columns(), "x");
  TORCH_CHECK(topk_ids.dim() == 2 && topk_ids.size(0) == x.size(0), "topk_ids");
  TORCH_CHECK(topk_weights.sizes() == topk_ids.sizes(), "topk_weights");
}

// Rows of (token, choice) pairs sorted by expert.
struct Routing {
  std::vector<int64_t> offsets;   // of each expert's rows, and the end
  std::vector<int64_t> source;    // token of each row
  std::vector<int64_t> position;  // row of each pair

  Routing(const int64_t* ids, int64_t tokens, int64_t top_k, int64_t experts)
      : offsets(experts + 1), source(tokens * top_k), position(tokens * top_k) {
    for (int64_t i = 0; i < tokens * top_k; ++i) ++offsets[ids[i] + 1];
    for (int64_t expert = 0; expert < experts; ++expert) offsets[expert + 1] += offsets[expert];
    std::vector<int64_t> cursor(offsets.begin(), offsets.end() - 1);
    for (int64_t i = 0; i < tokens * top_k; ++i) {
      position[i] = cursor[ids[i]]++;
      source[position[i]] = i / top_k;
    }
  }
};

// Work below this many multiply-adds a thread is not worth waking one up for.
constexpr int64_t kGrain = 1 << 17;

// Scratch of the calling thread; it grows to the largest request and is then reused.
inline float* scratch(int64_t floats) {
  struct Free {
    void operator()(float* memory) const { ::operator delete[](memory, std::align_val_t(64)); }
  };
  thread_local std::unique_ptr<float[], Free> memory;
  thread_local int64_t size = 0;
  if (size < floats) {
    memory.reset(static_cast<float*>(::operator new[](4 * floats, std::align_val_t(64))));
    size = floats;
  }
  return memory.get();
}

// What the Python module offers, of both orders of weights; the Python package says what it does.
Tensor linear(const Tensor& x, const Tensor& upper, const std::optional<Tensor>& lower, bool e5m2,
              const std::optional<Tensor>& row_shift, const std::optional<Tensor>& bias);
Tensor linear_packed(const Tensor& x, const Tensor& upper, const std::optional<Tensor>& lower,
                     bool e5m2, const std::optional<Tensor>& row_shift,
                     const std::optional<Tensor>& bias);
Tensor moe(const Tensor& x, const Tensor& upper13, const std::optional<Tensor>& lower13,
           bool e5m2_13, const std::optional<Tensor>& row_shift13, const Tensor& upper2,
           const std::optional<Tensor>& lower2, bool e5m2_2,
           const std::optional<Tensor>& row_shift2, const Tensor& topk_weights,
           const Tensor& topk_ids);
Tensor moe_packed(const Tensor& x, const Tensor& upper13, const std::optional<Tensor>& lower13,
                  bool e5m2_13, const std::optional<Tensor>& row_shift13, const Tensor& upper2,
                  const std::optional<Tensor>& lower2, bool e5m2_2,
                  const std::optional<Tensor>& row_shift2, const Tensor& topk_weights,
                  const Tensor& topk_ids);
std::tuple<Tensor, Tensor> route(const Tensor& logits, int64_t top_k);
Tensor linear_16bit(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias);
void reconstruct(const Tensor& out, const Tensor& upper, const std::optional<Tensor>& lower,
                 bool e5m2, const std::optional<Tensor>& row_shift, int64_t rows_per_block,
                 int64_t interleave, const std::optional<Tensor>& experts);
int64_t read_all(const Tensor& data);
void zero_all(Tensor data);
void row_sums_of(const Tensor& words, const Tensor& weights, Tensor sums);
void copy_rows_of(Tensor target, const Tensor& source, const Tensor& weights, Tensor sums);

}  // namespace dps
