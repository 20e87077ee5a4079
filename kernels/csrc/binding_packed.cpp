// The kernels on tensors, weights in packed order: bfloat16 activations, instruction sets that
// multiply them.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <cstring>
#include <thread>

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

// Runs of panels a thread: enough to even out threads that differ in speed, few enough to keep the
// streams of weights long.
constexpr int64_t kTasksOfThread = 8;

// Panels of each of about `runs` runs: whole pairs of them, which take turns.
int64_t even_share(int64_t panels, int64_t runs) {
  const int64_t pairs = (panels + 1) / 2;
  runs = std::clamp<int64_t>(runs, 1, pairs);
  return 2 * ((pairs + runs - 1) / runs);
}

// Activations up to this many stay in the L1 cache, where rows far apart are as near as packed ones.
constexpr int64_t kPlainElements = 1 << 14;

// Tokens of one pass over the experts, and the most float32 values of their rows at once.
constexpr int64_t kPassTokens = 2048, kRowFloats = 4 << 20;

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

}  // namespace

namespace dps {

Tensor linear_packed(const Tensor& x, const Tensor& upper, const std::optional<Tensor>& lower,
                     bool e5m2, const std::optional<Tensor>& row_shift,
                     const std::optional<Tensor>& bias) {
  const NestedWeight weight{upper, lower, e5m2, row_shift};
  weight.check(2);
  const int64_t rows = weight.rows(), columns = weight.columns();
  check_linear(x, rows, columns, bias);
  TORCH_CHECK(rows % kPanelRows == 0 && columns % kStep == 0, "layout");
  auto shape = x.sizes().vec();
  shape.back() = rows;
  Tensor y = at::empty(shape, x.options());
  const int64_t tokens = x.numel() / columns;
  if (tokens == 0) return y;
  const Tensor input = x.contiguous();
  const Tensor offset = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  const bool plain = tokens <= packed().plain_tokens && tokens * columns <= kPlainElements;
  Tensor tiles = input;
  if (tokens > 1 && !plain) {
    tiles = at::empty_like(input);
    const int64_t count = (tokens + kTileTokens - 1) / kTileTokens;
    at::parallel_for(0, count, 4, [&](int64_t first, int64_t last) {
      for (int64_t tile = first; tile < last; ++tile)
        pack_tile(halves(input), nullptr, tile * kTileTokens, tokens, columns, halves_out(tiles));
    });
  }
  const PackedGemm gemm{weight.matrix(),
                        halves(tiles),
                        plain,
                        tokens,
                        bias ? offset.const_data_ptr<float>() : nullptr,
                        halves_out(y),
                        Dtype::Bf16,
                        rows};
  const int64_t panels = rows / kPanelRows;
  const int64_t runs = std::min(kTasksOfThread * at::get_num_threads(),
                                panels * kPanelRows * columns * tokens / kGrain);
  const int64_t size = even_share(panels, runs);
  parallel_tasks(0, (panels + size - 1) / size, [&](int64_t task, int64_t following) {
    const int64_t after = (following < 0 ? task : following) * size;
    packed().gemm(gemm, task * size, std::min((task + 1) * size, panels), after,
                  scratch(packed_scratch(tokens)));
  });
  return y;
}

}  // namespace dps

namespace {

// The work of a pass over routed experts: runs of gate and up panels, then of down panels, each of
// which waits for the gated rows of its expert.
class Plan {
 public:
  enum class Part { GateUp, Down };
  struct Task {
    Part part;
    int64_t expert, first, last;
  };

  explicit Plan(const Routing& routing) : open_(routing.offsets.size()) {
    for (size_t expert = 0; expert + 1 < routing.offsets.size(); ++expert)
      if (routing.offsets[expert] < routing.offsets[expert + 1]) active_.push_back(expert);
  }

  // As many runs an expert as keep all threads busy to the end, equally many for each if it can be;
  // `work` is the multiply-adds of all.
  void add(Part part, int64_t panels, int64_t work) {
    const int64_t threads = at::get_num_threads(), active = active_.size();
    int64_t runs = std::min(kTasksOfThread * threads, work / kGrain) / active;
    if (runs > threads) runs -= runs % threads;
    const int64_t size = even_share(panels, runs);
    for (const int64_t expert : active_) {
      for (int64_t first = 0; first < panels; first += size) {
        list_.push_back({part, expert, first, std::min(first + size, panels)});
        if (part == Part::GateUp) open_[expert].fetch_add(1, std::memory_order_relaxed);
      }
    }
    if (part == Part::GateUp) gates_ = list_.size();
  }

  template <typename Run>
  void run(const Run& run) {
    parallel_tasks(gates_, list_.size(), [&](int64_t index, int64_t following) {
      const Task& task = list_[index];
      auto& open = open_[task.expert];
      if (task.part == Part::Down) {
        while (open.load(std::memory_order_acquire) > 0) {
          if (failed_) return;  // some rows will never come
          std::this_thread::yield();
        }
      }
      try {
        run(task, following);
      } catch (...) {
        failed_ = true;
        throw;
      }
      if (task.part == Part::GateUp) open.fetch_sub(1, std::memory_order_release);
    });
    list_.clear();
    gates_ = 0;
  }

  // Where the thread goes on, in panels from the first of the task's expert; each has so many.
  int64_t after(const Task& task, int64_t following, int64_t panels) const {
    if (following < 0 || list_[following].part != task.part) return task.first;
    return (list_[following].expert - task.expert) * panels + list_[following].first;
  }

 private:
  std::vector<int64_t> active_;
  std::vector<Task> list_;
  int64_t gates_ = 0;
  std::atomic<bool> failed_ = false;
  std::vector<std::atomic<int32_t>> open_;  // runs of gate and up panels that are not done
};

// Gate panels [first, last) and their up panels times an expert's tokens, into gated rows as packed
// activations.
void gate_rows(const Tensor& x, const NestedWeight& w13, const Routing& routing,
               const Plan::Task& task, int64_t after, uint16_t* gated) {
  const int64_t hidden = w13.columns(), inner = w13.rows() / 2;
  const int64_t row = routing.offsets[task.expert], count = routing.offsets[task.expert + 1] - row;
  // An expert's tokens are gathered where they stay in the cache until all its panels are done.
  for (int64_t begin = 0; begin < count; begin += kBlockTokens) {
    const int64_t tokens = std::min(kBlockTokens, count - begin);
    float* const room = scratch(packed_scratch(tokens) + tokens * hidden / 2);
    auto* const tiles = reinterpret_cast<uint16_t*>(room + packed_scratch(tokens));
    for (int64_t token = 0; token < tokens; token += kTileTokens)
      pack_tile(halves(x), routing.source.data() + row + begin, token, tokens, hidden, tiles);
    const PackedGemm gemm{w13.matrix(task.expert),
                          tiles,
                          false,
                          tokens,
                          nullptr,
                          gated + (row + begin) * inner,
                          Dtype::Bf16,
                          inner};
    for (int64_t panel = task.first; panel < task.last; panel += kBlockPanels / 2) {
      const int64_t end = std::min(panel + kBlockPanels / 2, task.last);
      packed().gate(gemm, w13.rows(), panel, end, end < task.last ? end : after, room);
    }
  }
}

// One pass of tokens through their experts. The second product goes over blocks of output columns:
// float32 rows of all pairs of token and expert take little memory.
void pass(const Tensor& x, const NestedWeight& w13, const NestedWeight& w2, const Routing& routing,
          const float* factors, int64_t top_k, uint16_t* y) {
  const int64_t hidden = w2.rows(), inner = w2.columns(), pairs = x.size(0) * top_k;
  const int64_t whole = hidden / kPanelRows;
  const int64_t block = std::clamp<int64_t>(kRowFloats / (pairs * kPanelRows), 1, whole);
  Tensor gated = at::empty({pairs, inner}, x.options());
  Tensor rows = at::empty({pairs, block * kPanelRows}, x.options().dtype(at::kFloat));
  Plan plan(routing);
  plan.add(Plan::Part::GateUp, inner / kPanelRows, pairs * 2 * inner * hidden);
  for (int64_t begin = 0; begin < whole; begin += block) {
    const int64_t columns = std::min(block, whole - begin) * kPanelRows;
    plan.add(Plan::Part::Down, columns / kPanelRows, pairs * inner * columns);
    plan.run([&](const Plan::Task& task, int64_t following) {
      if (task.part == Plan::Part::GateUp) {
        const int64_t after = plan.after(task, following, w13.rows() / kPanelRows);
        return gate_rows(x, w13, routing, task, after, halves_out(gated));
      }
      const int64_t row = routing.offsets[task.expert];
      const PackedGemm gemm{w2.matrix(task.expert, begin * kPanelRows),
                            halves(gated) + row * inner,
                            false,
                            routing.offsets[task.expert + 1] - row,
                            nullptr,
                            rows.mutable_data_ptr<float>() + row * columns,
                            Dtype::Fp32,
                            columns};
      packed().gemm(gemm, task.first, task.last, plan.after(task, following, whole),
                    scratch(packed_scratch(gemm.tokens)));
    });
    const int64_t grain = std::max<int64_t>(1, kGrain / (top_k * columns));
    at::parallel_for(0, pairs / top_k, grain, [&](int64_t first, int64_t last) {
      for (int64_t token = first; token < last; ++token)
        packed().combine(rows.const_data_ptr<float>(), routing.position.data() + token * top_k,
                         factors + token * top_k, top_k, columns,
                         y + token * hidden + begin * kPanelRows);
    });
  }
}

}  // namespace

namespace dps {

Tensor moe_packed(const Tensor& x, const Tensor& upper13, const std::optional<Tensor>& lower13,
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
  for (int64_t first = 0; first < tokens; first += kPassTokens) {
    const Tensor part = input.narrow(0, first, std::min(kPassTokens, tokens - first));
    const Routing routing(id + first * top_k, part.size(0), top_k, w13.upper.size(0));
    pass(part, w13, w2, routing, factors.const_data_ptr<float>() + first * top_k, top_k,
         halves_out(y) + first * hidden);
  }
  return y;
}

}  // namespace dps
