// AVX-512 with bfloat16 dot products and bit matrices (GFNI).
#include <immintrin.h>

#include "scalar.h"

namespace dps {
namespace {

class Unit {
 public:
  static constexpr int64_t kTurnTokens = 0;  // sums always wait in memory

  // Adds the products of `steps` steps from column k on to sums[tokens][32], or begins them at k 0.
  // Meanwhile `blocks` of the next chunk's blocks are decoded with every step and two tiles.
  template <typename Ahead>
  void multiply(const uint16_t* x, int64_t tokens, int64_t columns, int64_t k, int64_t steps,
                const uint16_t* weights, int64_t blocks, Ahead& ahead, float* sums) {
    for (int64_t tile = 0; tile < tokens; tile += kTileTokens) {
      const int64_t height = smaller(tokens - tile, kTileTokens);
      const uint16_t* from = x + tile * columns + k * height;
      float* out = sums + tile * kPanelRows;
      int64_t token = 0;
      for (; token + 8 <= height; token += 8)
        tokens_of_tile<8>(from + token * kStep, height, steps, weights, out + token * kPanelRows, k);
      from += token * kStep;
      out += token * kPanelRows;
      switch (height - token) {
        case 1: tokens_of_tile<1>(from, height, steps, weights, out, k); break;
        case 2: tokens_of_tile<2>(from, height, steps, weights, out, k); break;
        case 3: tokens_of_tile<3>(from, height, steps, weights, out, k); break;
        case 4: tokens_of_tile<4>(from, height, steps, weights, out, k); break;
        case 5: tokens_of_tile<5>(from, height, steps, weights, out, k); break;
        case 6: tokens_of_tile<6>(from, height, steps, weights, out, k); break;
        case 7: tokens_of_tile<7>(from, height, steps, weights, out, k); break;
        default: break;
      }
      ahead.work(blocks * steps);
    }
  }

 private:
  template <int M>
  static void tokens_of_tile(const uint16_t* x, int64_t height, int64_t steps,
                             const uint16_t* weights, float* out, int64_t k) {
    __m512 sums[M][2];
    for (int m = 0; m < M; ++m)
      for (int h = 0; h < 2; ++h)
        sums[m][h] = k ? _mm512_loadu_ps(out + m * kPanelRows + 16 * h) : _mm512_setzero_ps();
    for (int64_t step = 0; step < steps; ++step, weights += 1024, x += height * kStep) {
      for (int pair = 0; pair < kStep / 2; ++pair) {
        const __m512bh w0 = load(weights + 32 * pair), w1 = load(weights + 512 + 32 * pair);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          uint32_t both;
          std::memcpy(&both, x + m * kStep + 2 * pair, 4);
          const auto token = (__m512bh)_mm512_set1_epi32(static_cast<int>(both));
          sums[m][0] = _mm512_dpbf16_ps(sums[m][0], w0, token);
          sums[m][1] = _mm512_dpbf16_ps(sums[m][1], w1, token);
        }
      }
    }
    for (int m = 0; m < M; ++m)
      for (int h = 0; h < 2; ++h) _mm512_storeu_ps(out + m * kPanelRows + 16 * h, sums[m][h]);
  }

  static __m512bh load(const uint16_t* p) { return (__m512bh)_mm512_load_si512(p); }
};

}  // namespace
}  // namespace dps

#include "packed.inl"

namespace dps {
const PackedKernels& avx512_bf16_kernels() {
  static const PackedKernels set{1, packed_gemm, packed_gate, combine};
  return set;
}
}  // namespace dps
