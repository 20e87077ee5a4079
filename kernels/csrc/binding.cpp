// torch operators over the kernels. Arguments are checked by the Python package; what is asserted
// here is only what the memory accesses below rely on.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "kernels.h"

namespace {

using at::Tensor;
using dps::Codec;

const uint8_t* bytes(const std::optional<Tensor>& plane) {
  return plane ? plane->const_data_ptr<uint8_t>() : nullptr;
}

const int8_t* shifts(const std::optional<Tensor>& row_shift) {
  return row_shift ? row_shift->const_data_ptr<int8_t>() : nullptr;
}

Codec nested_codec(bool e5m2, bool full) {
  if (e5m2) return full ? Codec::E5m2Full : Codec::E5m2Fast;
  return full ? Codec::E4m3Full : Codec::E4m3Fast;
}

dps::Dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return dps::Dtype::Fp32;
    case at::kHalf: return dps::Dtype::Fp16;
    case at::kBFloat16: return dps::Dtype::Bf16;
    default: TORCH_CHECK(false, "dtype is ", tensor.scalar_type(), ": use float32, float16 or bfloat16");
  }
}

int64_t padded(int64_t columns) { return (columns + dps::kStep - 1) / dps::kStep * dps::kStep; }

// Scratch of the calling thread; it grows to the largest request and is then reused.
float* scratch(int64_t floats) {
  thread_local std::unique_ptr<float[]> memory;
  thread_local int64_t size = 0;
  if (size < floats) {
    memory.reset(new float[floats]);
    size = floats;
  }
  return memory.get();
}

// Rows of activations as float32, zero from the last column to a whole number of steps.
Tensor activations(const Tensor& x, int64_t columns) {
  Tensor rows = x.reshape({-1, columns});
  const int64_t width = padded(columns);
  if (width == columns) return rows.to(at::kFloat).contiguous();
  Tensor out = at::zeros({rows.size(0), width}, x.options().dtype(at::kFloat));
  out.narrow(1, 0, columns).copy_(rows);
  return out;
}

// Work below this many multiply-adds a thread is not worth waking one up for.
constexpr int64_t kGrain = 1 << 17;

Tensor multiply(const Tensor& x, const dps::Weight& weight, int64_t rows,
                const std::optional<Tensor>& bias) {
  auto shape = x.sizes().vec();
  shape.back() = rows;
  Tensor y = at::empty(shape, x.options());
  const int64_t tokens = x.numel() / weight.columns;
  if (tokens == 0) return y;
  const Tensor input = activations(x, weight.columns);
  const Tensor offset = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  const dps::Gemm gemm{weight,
                       input.const_data_ptr<float>(),
                       padded(weight.columns),
                       tokens,
                       bias ? offset.const_data_ptr<float>() : nullptr,
                       y.mutable_data_ptr(),
                       dtype_of(y),
                       rows};
  const int64_t grain = std::max<int64_t>(12, kGrain / (weight.columns * tokens));
  at::parallel_for(0, rows, grain, [&](int64_t first, int64_t last) {
    const int64_t panel = dps::panel_rows(gemm.padded) * gemm.padded;
    dps::kernels().gemm(gemm, first, last, scratch(panel));
  });
  return y;
}

Tensor linear(const Tensor& x, const Tensor& upper, const std::optional<Tensor>& lower, bool e5m2,
              const std::optional<Tensor>& row_shift, const std::optional<Tensor>& bias) {
  const dps::Weight weight{nested_codec(e5m2, lower.has_value()),
                           upper.const_data_ptr<uint8_t>(), bytes(lower), shifts(row_shift),
                           upper.size(1)};
  return multiply(x, weight, upper.size(0), bias);
}

Tensor linear_16bit(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const Codec codec = dtype_of(weight) == dps::Dtype::Fp16 ? Codec::Fp16 : Codec::Bf16;
  const auto* data = static_cast<const uint8_t*>(weight.const_data_ptr());
  return multiply(x, {codec, data, nullptr, nullptr, weight.size(1)}, weight.size(0), bias);
}

void reconstruct(const Tensor& out, const Tensor& upper, const std::optional<Tensor>& lower,
                 bool e5m2, const std::optional<Tensor>& row_shift, int64_t rows_per_block,
                 int64_t interleave, const std::optional<Tensor>& experts) {
  const int64_t columns = upper.size(-1);
  const int64_t rows = upper.size(-2);
  const int64_t block = rows_per_block * columns;
  const int64_t blocks = rows / rows_per_block;
  const int64_t* ids = experts ? experts->const_data_ptr<int64_t>() : nullptr;
  const int64_t matrices = experts ? experts->numel() : upper.numel() / (rows * columns);
  auto* target = static_cast<uint16_t*>(out.mutable_data_ptr());
  const int64_t grain = std::max<int64_t>(1, kGrain / block);
  at::parallel_for(0, matrices * blocks, grain, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t matrix = ids ? ids[task / blocks] : task / blocks;
      const int64_t row = matrix * rows + task % blocks * rows_per_block;
      const int64_t start = row * columns;
      const uint8_t* low = bytes(lower);
      const int8_t* shift = shifts(row_shift);
      dps::kernels().decode({nested_codec(e5m2, lower.has_value()),
                             upper.const_data_ptr<uint8_t>() + start,
                             low ? low + start : nullptr,
                             shift ? shift + row : nullptr,
                             rows_per_block,
                             columns,
                             interleave,
                             target + start,
                             dtype_of(out) == dps::Dtype::Bf16},
                            scratch(rows_per_block * interleave));
    }
  });
}

struct Experts {
  const Tensor& upper;
  const std::optional<Tensor>& lower;
  bool e5m2;
  const std::optional<Tensor>& row_shift;

  dps::Weight of(int64_t expert) const {
    const int64_t rows = upper.size(1), columns = upper.size(2), start = expert * rows * columns;
    const uint8_t* low = bytes(lower);
    const int8_t* shift = shifts(row_shift);
    return {nested_codec(e5m2, lower.has_value()), upper.const_data_ptr<uint8_t>() + start,
            low ? low + start : nullptr, shift ? shift + expert * rows : nullptr, columns};
  }
};

// y[p] = x[p] @ w[expert of p] for rows sorted by expert; `offsets` bounds each expert's rows.
// Experts differ in load, so that threads take blocks of rows as they become free.
Tensor grouped(const Tensor& x, const Experts& w, const std::vector<int64_t>& offsets) {
  const int64_t rows = w.upper.size(1), width = padded(w.upper.size(2));
  const Tensor input = activations(x, w.upper.size(2));
  Tensor y = at::empty({x.size(0), rows}, input.options());
  constexpr int64_t kBlock = 96;
  std::vector<std::pair<int64_t, int64_t>> tasks;  // expert, first row
  for (int64_t expert = 0; expert + 1 < static_cast<int64_t>(offsets.size()); ++expert)
    if (offsets[expert] < offsets[expert + 1])
      for (int64_t row = 0; row < rows; row += kBlock) tasks.emplace_back(expert, row);
  std::atomic<size_t> next{0};
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    float* panel = scratch(dps::panel_rows(width) * width);
    for (size_t task = next++; task < tasks.size(); task = next++) {
      const auto [expert, row] = tasks[task];
      const int64_t begin = offsets[expert];
      const dps::Gemm gemm{w.of(expert),
                           input.const_data_ptr<float>() + begin * width,
                           width,
                           offsets[expert + 1] - begin,
                           nullptr,
                           y.mutable_data_ptr<float>() + begin * rows,
                           dps::Dtype::Fp32,
                           rows};
      dps::kernels().gemm(gemm, row, std::min(row + kBlock, rows), panel);
    }
  });
  return y;
}

// Tokens of one pass: bounds the float32 intermediates, which hold top-k rows a token.
constexpr int64_t kMoeTokens = 512;

Tensor moe_pass(const Tensor& x, const Experts& w13, const Experts& w2, const Tensor& weights,
                const Tensor& ids) {
  const int64_t tokens = ids.size(0), top_k = ids.size(1), experts = w13.upper.size(0);
  const int64_t* id = ids.const_data_ptr<int64_t>();
  std::vector<int64_t> offsets(experts + 1, 0);
  for (int64_t i = 0; i < ids.numel(); ++i) ++offsets[id[i] + 1];
  for (int64_t expert = 0; expert < experts; ++expert) offsets[expert + 1] += offsets[expert];
  Tensor source = at::empty({ids.numel()}, ids.options());    // token of each sorted row
  Tensor position = at::empty({ids.numel()}, ids.options());  // sorted row of each (token, choice)
  std::vector<int64_t> cursor(offsets.begin(), offsets.end() - 1);
  for (int64_t i = 0; i < ids.numel(); ++i) {
    const int64_t row = cursor[id[i]]++;
    source.mutable_data_ptr<int64_t>()[row] = i / top_k;
    position.mutable_data_ptr<int64_t>()[i] = row;
  }
  const Tensor hidden = grouped(x.index_select(0, source), w13, offsets);
  const int64_t inner = hidden.size(1) / 2;
  const Tensor gated = at::silu(hidden.narrow(1, 0, inner)).mul_(hidden.narrow(1, inner, inner));
  const Tensor rows = grouped(gated, w2, offsets).index_select(0, position);
  return rows.view({tokens, top_k, -1}).mul_(weights.unsqueeze(2)).sum(1).to(x.scalar_type());
}

Tensor moe(const Tensor& x, const Tensor& upper13, const std::optional<Tensor>& lower13,
           bool e5m2_13, const std::optional<Tensor>& row_shift13, const Tensor& upper2,
           const std::optional<Tensor>& lower2, bool e5m2_2,
           const std::optional<Tensor>& row_shift2, const Tensor& topk_weights,
           const Tensor& topk_ids) {
  const Experts w13{upper13, lower13, e5m2_13, row_shift13};
  const Experts w2{upper2, lower2, e5m2_2, row_shift2};
  const Tensor weights = topk_weights.to(at::kFloat).contiguous();
  const Tensor ids = topk_ids.to(at::kLong).contiguous();
  if (ids.numel() == 0) return at::zeros_like(x);
  TORCH_CHECK(ids.min().item<int64_t>() >= 0 && ids.max().item<int64_t>() < upper13.size(0),
              "topk_ids must lie in 0..", upper13.size(0) - 1);
  std::vector<Tensor> parts;
  for (int64_t first = 0; first < x.size(0); first += kMoeTokens) {
    const int64_t count = std::min(kMoeTokens, x.size(0) - first);
    parts.push_back(moe_pass(x.narrow(0, first, count), w13, w2, weights.narrow(0, first, count),
                             ids.narrow(0, first, count)));
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts);
}

int64_t read_all(const Tensor& data) {
  const auto* first = static_cast<const uint8_t*>(data.const_data_ptr());
  const int64_t size = data.numel() * data.element_size();
  std::atomic<uint64_t> folded{0};
  at::parallel_for(0, size, std::max<int64_t>(size / at::get_num_threads(), 1 << 16),
                   [&](int64_t from, int64_t to) {
                     folded ^= dps::read_lines(first + from, to - from);
                   });
  return static_cast<int64_t>(folded.load());
}

std::string isa() { return dps::kernels().name; }

}  // namespace

TORCH_LIBRARY(dps_kernels, m) {
  m.def("linear(Tensor x, Tensor upper, Tensor? lower, bool e5m2, Tensor? row_shift, Tensor? bias) -> Tensor");
  m.def("linear_16bit(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def("reconstruct(Tensor(a!) out, Tensor upper, Tensor? lower, bool e5m2, Tensor? row_shift, "
        "int rows_per_block, int interleave, Tensor? experts) -> ()");
  m.def("moe(Tensor x, Tensor upper13, Tensor? lower13, bool e5m2_13, Tensor? row_shift13, "
        "Tensor upper2, Tensor? lower2, bool e5m2_2, Tensor? row_shift2, Tensor topk_weights, "
        "Tensor topk_ids) -> Tensor");
  m.def("read_all(Tensor data) -> int");
  m.def("isa() -> str", isa);
}

TORCH_LIBRARY_IMPL(dps_kernels, CPU, m) {
  m.impl("linear", linear);
  m.impl("linear_16bit", linear_16bit);
  m.impl("reconstruct", reconstruct);
  m.impl("moe", moe);
  m.impl("read_all", read_all);
}
