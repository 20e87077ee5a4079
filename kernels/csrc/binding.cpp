// What the kernels do to torch's tensors, on weights in row-major order.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros_like.h>

#include "binding.h"

namespace {

using at::Tensor;
using dps::Codec;
using dps::kGrain;
using dps::NestedWeight;
using dps::scratch;

// Tokens of one pass over the experts: bounds the float32 intermediates, top-k rows a token.
constexpr int64_t kMoeTokens = 512;

dps::Dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return dps::Dtype::Fp32;
    case at::kHalf: return dps::Dtype::Fp16;
    case at::kBFloat16: return dps::Dtype::Bf16;
    default: TORCH_CHECK(false, "dtype is ", tensor.scalar_type(), ": use float32, float16 or bfloat16");
  }
}

int64_t padded(int64_t columns) { return (columns + dps::kStep - 1) / dps::kStep * dps::kStep; }

// Rows of activations as float32, zero from the last column to a whole number of steps. Rows of many
// tokens stand a cache line further apart: at a power of two they would share a few cache sets.
Tensor activations(const Tensor& x, int64_t columns) {
  const Tensor rows = x.reshape({-1, columns});
  const int64_t width = padded(columns), tokens = rows.size(0);
  const int64_t stride = width + (tokens > dps::kDirectTokens ? 16 : 0);
  if (stride == columns) return rows.to(at::kFloat).contiguous();
  const Tensor out = at::empty({tokens, stride}, x.options().dtype(at::kFloat));
  out.narrow(1, 0, columns).copy_(rows);
  if (width > columns) out.narrow(1, columns, width - columns).zero_();
  return out;
}

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
                       input.size(1),
                       tokens,
                       bias ? offset.const_data_ptr<float>() : nullptr,
                       y.mutable_data_ptr(),
                       dtype_of(y),
                       rows};
  const int64_t grain = std::max<int64_t>(dps::kChunkRows, kGrain / (weight.columns * tokens));
  at::parallel_for(0, rows, grain, [&](int64_t first, int64_t last) {
    dps::kernels().gemm(gemm, first, last, scratch(dps::gemm_scratch(tokens)));
  });
  return y;
}

}  // namespace

namespace dps {

Tensor linear(const Tensor& x, const Tensor& upper, const std::optional<Tensor>& lower, bool e5m2,
              const std::optional<Tensor>& row_shift, const std::optional<Tensor>& bias) {
  const NestedWeight weight{upper, lower, e5m2, row_shift};
  weight.check(2);
  dps::check_linear(x, weight.rows(), weight.columns(), bias);
  return multiply(x, weight.matrix(), weight.rows(), bias);
}

Tensor linear_16bit(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const Codec codec = dtype_of(weight) == dps::Dtype::Fp16 ? Codec::Fp16 : Codec::Bf16;
  const auto* data = static_cast<const uint8_t*>(weight.const_data_ptr());
  return multiply(x, {codec, data, nullptr, nullptr, weight.size(1)}, weight.size(0), bias);
}

void reconstruct(const Tensor& out, const Tensor& upper, const std::optional<Tensor>& lower,
                 bool e5m2, const std::optional<Tensor>& row_shift, int64_t rows_per_block,
                 int64_t interleave, const std::optional<Tensor>& experts) {
  const NestedWeight weight{upper, lower, e5m2, row_shift};
  const int64_t rows = weight.rows(), columns = weight.columns();
  const int64_t block = rows_per_block * columns;
  const int64_t blocks = rows / rows_per_block;
  const int64_t* ids = experts ? experts->const_data_ptr<int64_t>() : nullptr;
  const int64_t matrices = experts ? experts->numel() : upper.numel() / (rows * columns);
  auto* target = static_cast<uint16_t*>(out.mutable_data_ptr());
  const int64_t grain = std::max<int64_t>(1, kGrain / block);
  at::parallel_for(0, matrices * blocks, grain, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t matrix = ids ? ids[task / blocks] : task / blocks;
      const dps::Weight w = weight.matrix(matrix);
      const int64_t row = task % blocks * rows_per_block;
      const int64_t start = row * columns;
      dps::kernels().decode({w.codec, w.upper + start, w.lower ? w.lower + start : nullptr,
                             w.row_shift ? w.row_shift + row : nullptr, rows_per_block, columns,
                             interleave, target + matrix * rows * columns + start,
                             dtype_of(out) == dps::Dtype::Bf16},
                            scratch(rows_per_block * interleave));
    }
  });
}

}  // namespace dps

namespace {

// y[p] = x[p] @ w[expert of p] for rows sorted by expert.
Tensor grouped(const Tensor& x, const NestedWeight& w, const std::vector<int64_t>& offsets) {
  const int64_t rows = w.rows();
  const Tensor input = activations(x, w.columns());
  Tensor y = at::empty({x.size(0), rows}, input.options());
  constexpr int64_t kBlock = 96;
  std::vector<std::pair<int64_t, int64_t>> tasks;  // expert, first row
  for (int64_t expert = 0; expert + 1 < static_cast<int64_t>(offsets.size()); ++expert)
    if (offsets[expert] < offsets[expert + 1])
      for (int64_t row = 0; row < rows; row += kBlock) tasks.emplace_back(expert, row);
  dps::parallel_tasks(0, tasks.size(), [&](int64_t task, int64_t) {
    const auto [expert, row] = tasks[task];
    const int64_t begin = offsets[expert];
    const dps::Gemm gemm{w.matrix(expert),
                         input.const_data_ptr<float>() + begin * input.size(1),
                         padded(w.columns()),
                         input.size(1),
                         offsets[expert + 1] - begin,
                         nullptr,
                         y.mutable_data_ptr<float>() + begin * rows,
                         dps::Dtype::Fp32,
                         rows};
    dps::kernels().gemm(gemm, row, std::min(row + kBlock, rows),
                        scratch(dps::gemm_scratch(gemm.tokens)));
  });
  return y;
}

Tensor numbers(const std::vector<int64_t>& values, const Tensor& like) {
  Tensor out = at::empty({static_cast<int64_t>(values.size())}, like.options());
  std::copy(values.begin(), values.end(), out.mutable_data_ptr<int64_t>());
  return out;
}

Tensor moe_pass(const Tensor& x, const NestedWeight& w13, const NestedWeight& w2,
                const Tensor& weights, const Tensor& ids) {
  const int64_t tokens = ids.size(0), top_k = ids.size(1);
  const dps::Routing routing(ids.const_data_ptr<int64_t>(), tokens, top_k, w13.upper.size(0));
  const Tensor sorted = x.index_select(0, numbers(routing.source, ids));
  const Tensor hidden = grouped(sorted, w13, routing.offsets);
  const int64_t inner = hidden.size(1) / 2;
  const Tensor gated = at::silu(hidden.narrow(1, 0, inner)).mul_(hidden.narrow(1, inner, inner));
  const Tensor rows =
      grouped(gated, w2, routing.offsets).index_select(0, numbers(routing.position, ids));
  return rows.view({tokens, top_k, -1}).mul_(weights.unsqueeze(2)).sum(1).to(x.scalar_type());
}

}  // namespace

namespace dps {

Tensor moe(const Tensor& x, const Tensor& upper13, const std::optional<Tensor>& lower13,
           bool e5m2_13, const std::optional<Tensor>& row_shift13, const Tensor& upper2,
           const std::optional<Tensor>& lower2, bool e5m2_2,
           const std::optional<Tensor>& row_shift2, const Tensor& topk_weights,
           const Tensor& topk_ids) {
  const NestedWeight w13{upper13, lower13, e5m2_13, row_shift13};
  const NestedWeight w2{upper2, lower2, e5m2_2, row_shift2};
  dps::check_moe(x, w13, w2, topk_weights, topk_ids);
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

void zero_all(Tensor data) {
  TORCH_CHECK(data.is_contiguous(), "data must be contiguous");
  dps::zero_lines(static_cast<uint8_t*>(data.mutable_data_ptr()),
                  data.numel() * data.element_size());
}

}  // namespace dps

namespace {

uint64_t* rows_of(const Tensor& words, int64_t count) {
  TORCH_CHECK(words.is_contiguous() && words.scalar_type() == at::kLong && words.numel() == count,
              "words: ", count, " contiguous int64 are needed, not ", words.numel(), " of ",
              words.scalar_type());
  return reinterpret_cast<uint64_t*>(words.data_ptr<int64_t>());
}

}  // namespace

namespace dps {

void row_sums_of(const Tensor& words, const Tensor& weights, Tensor sums) {
  const int64_t rows = sums.numel(), columns = weights.numel();
  dps::row_sums(rows_of(words, rows * columns), rows_of(weights, columns), rows, columns,
                rows_of(sums, rows));
}

void copy_rows_of(Tensor target, const Tensor& source, const Tensor& weights, Tensor sums) {
  const int64_t rows = sums.numel(), columns = weights.numel();
  dps::copy_rows(rows_of(target, rows * columns), rows_of(source, rows * columns),
                 rows_of(weights, columns), rows, columns, rows_of(sums, rows));
}

}  // namespace dps
