// AMX: tiles of 16 tokens x 32 columns times 32 columns x 16 weight rows, bfloat16 to float32.
#include <immintrin.h>

#include "scalar.h"

namespace dps {
namespace {

struct alignas(64) TileConfig {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Tiles 0 to 3 hold sums (two tiles of tokens by two halves of a panel), 4 and 5 activations, 6 and
// 7 weights. Tiles of tokens may be short: that saves loads and stores of rows, not multiplications.
class Unit {
 public:
  ~Unit() { _tile_release(); }

  // Adds the products of `steps` steps from column k on to sums[tokens][32], or begins them at k 0.
  // Meanwhile `blocks` of the next chunk's blocks are decoded with every step and two tiles.
  template <typename Ahead>
  void multiply(const uint16_t* x, int64_t tokens, int64_t columns, int64_t k, int64_t steps,
                const uint16_t* weights, int64_t blocks, Ahead& ahead, float* sums) {
    fence();  // the compiler does not know that tile loads read what was decoded
    for (int64_t token = 0; token < tokens; token += 2 * kTileTokens) {
      const int64_t rest = tokens - token;
      const int64_t r0 = smaller(rest, kTileTokens);
      const int64_t r1 = smaller(rest - r0, kTileTokens);
      configure(r0, r1);
      const uint16_t* x0 = x + token * columns + k * r0;
      float* out = sums + token * kPanelRows;
      if (r1) {
        const uint16_t* x1 = x + (token + kTileTokens) * columns + k * r1;
        pair_of_tiles(x0, x1, r0, r1, steps, weights, blocks, ahead, out, k == 0);
      } else {
        one_tile(x0, r0, steps, weights, blocks, ahead, out, k == 0);
      }
    }
    fence();
  }

  // Up to kTurnTokens tokens: sums of two panels stay in tiles 0 to 3, from `begin` to `give`.
  static constexpr int64_t kTurnTokens = kTileTokens;

  void begin(int64_t tokens) {
    configure(tokens, tokens);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  // One step's activations, for the products up to the next.
  void take_tokens(const uint16_t* x, int64_t row_bytes) { _tile_loadd(4, x, row_bytes); }

  // Adds the products of one step of panel 0 or 1.
  template <int Panel>
  void add(const uint16_t* weights) {
    fence();
    _tile_loadd(6, weights, 64);
    _tile_loadd(7, weights + 512, 64);
    if constexpr (Panel == 0) {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    } else {
      _tile_dpbf16ps(2, 4, 6);
      _tile_dpbf16ps(3, 4, 7);
    }
  }

  void give(int panel, float* out) {
    constexpr int64_t row = kPanelRows * sizeof(float);
    if (panel == 0) {
      _tile_stored(0, out, row);
      _tile_stored(1, out + 16, row);
    } else {
      _tile_stored(2, out, row);
      _tile_stored(3, out + 16, row);
    }
    fence();
  }

 private:
  static void fence() { __asm__ volatile("" ::: "memory"); }

  // Configuring takes hundreds of cycles: whatever a lone tile finds for the second will do.
  void configure(int64_t r0, int64_t r1) {
    if (r0 == r0_ && (r1 == r1_ || r1 == 0)) return;
    r0_ = r0, r1_ = r1;
    TileConfig config{};
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      const bool second = tile == 2 || tile == 3 || tile == 5;
      config.row_bytes[tile] = 64;
      config.rows[tile] = static_cast<uint8_t>(tile >= 6 ? 16 : second ? (r1 ? r1 : 1) : r0);
    }
    __asm__ volatile("" ::"r"(&config) : "memory");  // the intrinsic tells of its first bytes only
    _tile_loadconfig(&config);
  }

  template <typename Ahead>
  static void one_tile(const uint16_t* x, int64_t height, int64_t steps, const uint16_t* weights,
                       int64_t blocks, Ahead& ahead, float* out, bool begin) {
    constexpr int64_t row = kPanelRows * sizeof(float);
    if (begin) {
      _tile_zero(0);
      _tile_zero(1);
    } else {
      _tile_loadd(0, out, row);
      _tile_loadd(1, out + 16, row);
    }
    for (int64_t step = 0; step < steps; ++step, weights += 1024, x += height * kStep) {
      _tile_loadd(4, x, 64);
      _tile_loadd(6, weights, 64);
      _tile_loadd(7, weights + 512, 64);
      ahead.work(blocks);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, out, row);
    _tile_stored(1, out + 16, row);
  }

  template <typename Ahead>
  static void pair_of_tiles(const uint16_t* x0, const uint16_t* x1, int64_t h0, int64_t h1,
                            int64_t steps, const uint16_t* weights, int64_t blocks, Ahead& ahead,
                            float* out, bool begin) {
    constexpr int64_t row = kPanelRows * sizeof(float);
    float* out1 = out + kTileTokens * kPanelRows;
    if (begin) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, out, row);
      _tile_loadd(1, out + 16, row);
      _tile_loadd(2, out1, row);
      _tile_loadd(3, out1 + 16, row);
    }
    for (int64_t step = 0; step < steps; ++step, weights += 1024) {
      _tile_loadd(4, x0, 64);
      _tile_loadd(6, weights, 64);
      _tile_loadd(7, weights + 512, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, x1, 64);
      ahead.work(blocks);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      x0 += h0 * kStep;
      x1 += h1 * kStep;
    }
    _tile_stored(0, out, row);
    _tile_stored(1, out + 16, row);
    _tile_stored(2, out1, row);
    _tile_stored(3, out1 + 16, row);
  }

  int64_t r0_ = 0, r1_ = 0;
};

}  // namespace
}  // namespace dps

#include "packed.inl"

namespace dps {
const PackedKernels& amx_kernels() {
  static const PackedKernels set{Unit::kTurnTokens, packed_gemm, packed_gate, combine};
  return set;
}
}  // namespace dps
