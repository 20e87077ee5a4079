// torch operators on packed weights: bfloat16 activations, instruction sets that multiply them.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cstring>

#include "binding.h"

namespace {

using at::Tensor;
using namespace dps;

const PackedKernels& packed() {
  TORCH_CHECK(kernels().packed, "packed weights need AVX-512 with bfloat16, this is ",
              kernels().name);
  return *kernels().packed;
}

const uint16_t* halves(const Tensor& x) {
  return reinterpret_cast<const uint16_t*>(x.const_data_ptr<at::BFloat16>());
}

uint16_t* halves_out(const Tensor& y) {
  return reinterpret_cast<uint16_t*>(y.mutable_data_ptr<at::BFloat16>());
}

// Copies one tile of up to 16 rows of x, rows source[0..] or those from `token` on.
void pack_tile(const uint16_t* x, const int64_t* source, int64_t token, int64_t tokens,
               int64_t columns, uint16_t* out) {
  const int64_t height = std::min(kTileTokens, tokens - token);
  for (int64_t m = 0; m < height; ++m) {
    const uint16_t* row = x + (source ? source[token + m] : token + m) * columns;
    for (int64_t block = 0; block < columns / kStep; ++block)
      std::memcpy(out + tile_index(token + m, block, tokens, columns), row + block * kStep,
                  kStep * sizeof(uint16_t));
  }
}

Tensor linear(const Tensor& x, const Tensor& upper, const std::optional<Tensor>& lower, bool e5m2,
              const std::optional<Tensor>& row_shift, const std::optional<Tensor>& bias) {
  const NestedWeight weight{upper, lower, e5m2, row_shift};
  const int64_t rows = weight.rows(), columns = weight.columns();
  weight.check(2);
  check_linear(x, rows, columns, bias);
  TORCH_CHECK(rows % kPanelRows == 0 && columns % kStep == 0, "layout");
  auto shape = x.sizes().vec();
  shape.back() = rows;
  Tensor y = at::empty(shape, x.options());
  const int64_t tokens = x.numel() / columns;
  if (tokens == 0) return y;
  const Tensor input = x.contiguous();
  const Tensor offset = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  Tensor tiles = input;
  if (tokens > 1) {
    tiles = at::empty_like(input);
    const int64_t count = (tokens + kTileTokens - 1) / kTileTokens;
    at::parallel_for(0, count, 4, [&](int64_t first, int64_t last) {
      for (int64_t tile = first; tile < last; ++tile)
        pack_tile(halves(input), nullptr, tile * kTileTokens, tokens, columns, halves_out(tiles));
    });
  }
  const PackedGemm gemm{weight.matrix(),
                        halves(tiles),
                        tokens,
                        bias ? offset.const_data_ptr<float>() : nullptr,
                        halves_out(y),
                        Dtype::Bf16,
                        rows};
  const int64_t grain = std::max<int64_t>(1, kGrain / (kPanelRows * columns * tokens));
  at::parallel_for(0, rows / kPanelRows, grain, [&](int64_t first, int64_t last) {
    packed().gemm(gemm, first, last, scratch(packed_scratch(tokens)));
  });
  return y;
}

// Tasks of the routed experts, in the order in which their weights stand in memory.
struct Tasks {
  struct Task {
    int64_t expert, first, last;
  };
  std::vector<Task> list;

  Tasks(const Routing& routing, int64_t panels, int64_t size) {
    for (int64_t expert = 0; expert + 1 < static_cast<int64_t>(routing.offsets.size()); ++expert)
      if (routing.offsets[expert] < routing.offsets[expert + 1])
        for (int64_t panel = 0; panel < panels; panel += size)
          list.push_back({expert, panel, std::min(panel + size, panels)});
  }
};

void moe_pass(const Tensor& x, const NestedWeight& w13, const NestedWeight& w2,
              const float* factors, const int64_t* ids, int64_t top_k, uint16_t* y) {
  const int64_t tokens = x.size(0), hidden = w13.columns(), inner = w2.columns();
  const Routing routing(ids, tokens, top_k, w13.upper.size(0));
  const Tensor tiles = at::empty({tokens * top_k, hidden}, x.options());
  const Tensor gated = at::empty({tokens * top_k, inner}, x.options());
  const Tensor rows = at::empty({tokens * top_k, hidden}, x.options().dtype(at::kFloat));
  const int64_t experts = w13.upper.size(0);
  parallel_tasks(experts, [&](int64_t expert) {
    const int64_t begin = routing.offsets[expert], count = routing.offsets[expert + 1] - begin;
    for (int64_t token = 0; token < count; token += kTileTokens)
      pack_tile(halves(x), routing.source.data() + begin, token, count, hidden,
                halves_out(tiles) + begin * hidden);
  });
  const auto gemm_of = [&](const NestedWeight& weight, const Tensor& input, int64_t expert) {
    const int64_t begin = routing.offsets[expert];
    return PackedGemm{weight.matrix(expert),
                      halves(input) + begin * weight.columns(),
                      routing.offsets[expert + 1] - begin,
                      nullptr,
                      nullptr,
                      Dtype::Fp32,
                      hidden};
  };
  const Tasks up(routing, inner / kPanelRows, kBlockPanels / 2);
  parallel_tasks(up.list.size(), [&](int64_t index) {
    const auto [expert, first, last] = up.list[index];
    PackedGemm gemm = gemm_of(w13, tiles, expert);
    gemm.y = halves_out(gated) + routing.offsets[expert] * inner;
    packed().gate(gemm, w13.rows(), first, last, scratch(packed_scratch(gemm.tokens)));
  });
  const Tasks down(routing, hidden / kPanelRows, 2 * kBlockPanels);
  parallel_tasks(down.list.size(), [&](int64_t index) {
    const auto [expert, first, last] = down.list[index];
    PackedGemm gemm = gemm_of(w2, gated, expert);
    gemm.y = rows.mutable_data_ptr<float>() + routing.offsets[expert] * hidden;
    packed().gemm(gemm, first, last, scratch(packed_scratch(gemm.tokens)));
  });
  at::parallel_for(0, tokens, 4, [&](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token)
      packed().combine(rows.const_data_ptr<float>(), routing.position.data() + token * top_k,
                       factors + token * top_k, top_k, hidden, y + token * hidden);
  });
}

Tensor moe(const Tensor& x, const Tensor& upper13, const std::optional<Tensor>& lower13,
           bool e5m2_13, const std::optional<Tensor>& row_shift13, const Tensor& upper2,
           const std::optional<Tensor>& lower2, bool e5m2_2,
           const std::optional<Tensor>& row_shift2, const Tensor& topk_weights,
           const Tensor& topk_ids) {
  const NestedWeight w13{upper13, lower13, e5m2_13, row_shift13};
  const NestedWeight w2{upper2, lower2, e5m2_2, row_shift2};
  check_moe(x, w13, w2, topk_weights, topk_ids);
  TORCH_CHECK(w13.rows() % (2 * kPanelRows) == 0 && w2.rows() % kPanelRows == 0, "layout");
  const Tensor input = x.contiguous();
  const Tensor factors = topk_weights.to(at::kFloat).contiguous();
  const Tensor ids = topk_ids.to(at::kLong).contiguous();
  const int64_t tokens = x.size(0), hidden = x.size(1), top_k = ids.size(1);
  if (ids.numel() == 0) return at::zeros_like(x);
  const auto* id = ids.const_data_ptr<int64_t>();
  const auto [low, high] = std::minmax_element(id, id + ids.numel());
  TORCH_CHECK(*low >= 0 && *high < upper13.size(0), "topk_ids must lie in 0..", upper13.size(0) - 1);
  Tensor y = at::empty_like(input);
  for (int64_t first = 0; first < tokens; first += kMoeTokens)
    moe_pass(input.narrow(0, first, std::min(kMoeTokens, tokens - first)), w13, w2,
             factors.const_data_ptr<float>() + first * top_k, id + first * top_k, top_k,
             halves_out(y) + first * hidden);
  return y;
}

bool has_packed() { return kernels().packed; }

}  // namespace

TORCH_LIBRARY_FRAGMENT(dps_kernels, m) {
  m.def("linear_packed(Tensor x, Tensor upper, Tensor? lower, bool e5m2, Tensor? row_shift, "
        "Tensor? bias) -> Tensor");
  m.def("moe_packed(Tensor x, Tensor upper13, Tensor? lower13, bool e5m2_13, Tensor? row_shift13, "
        "Tensor upper2, Tensor? lower2, bool e5m2_2, Tensor? row_shift2, Tensor topk_weights, "
        "Tensor topk_ids) -> Tensor");
  m.def("has_packed() -> bool", has_packed);
}

TORCH_LIBRARY_IMPL(dps_kernels, CPU, m) {
  m.impl("linear_packed", linear);
  m.impl("moe_packed", moe);
}
