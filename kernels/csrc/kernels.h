// Interface between the torch binding and the kernels of each instruction set. Plain C++: the
// kernel files see no torch header, so that each compiles in a second with its own -m flags.
#pragma once
#include <cstdint>

namespace dps {

// What the bytes of a weight are. The nested codecs carry FP16 bits in two planes (full mode) or
// an FP8 code in one (fast mode); the last two are ordinary 16-bit weights, passed as `upper`.
enum class Codec : int { E4m3Full, E4m3Fast, E5m2Full, E5m2Fast, Fp16, Bf16 };

enum class Dtype : int { Fp32, Fp16, Bf16 };

constexpr int64_t kStep = 32;  // weights decoded at once, and the padding of activations

// Row-major weight of `columns` a row. With `row_shift`, row n holds w * 2^row_shift[n].
struct Weight {
  Codec codec;
  const uint8_t* upper;
  const uint8_t* lower;
  const int8_t* row_shift;
  int64_t columns;
};

// y[m, n] = sum_k x[m, k] * w[n, k] + bias[n], accumulated in float32.
// x has rows of `padded` floats, zero from `columns` on, every `x_stride` floats.
// Every output is summed in one fixed order, whatever the number of tokens in the call.
struct Gemm {
  Weight w;
  const float* x;
  int64_t padded;
  int64_t x_stride;
  int64_t tokens;
  const float* bias;
  void* y;
  Dtype y_dtype;
  int64_t y_stride;
};

constexpr int64_t kDirectTokens = 4;  // up to here decoding row-major weights in registers wins

// What a row-major GEMM of many tokens has at hand: weights decoded at once, rows and columns, and
// the rows and tokens whose sums wait for further columns.
constexpr int64_t kChunkRows = 6, kDepth = 1024;
constexpr int64_t kGroupRows = 36, kManyTokens = 64;

constexpr int64_t gemm_scratch(int64_t tokens) {
  constexpr int64_t widest = 16;  // floats of a vector
  return kChunkRows * kDepth +
         kGroupRows * widest * (tokens < kManyTokens ? tokens : kManyTokens);
}

// A run of `blocks` blocks of elements stored as [columns / interleave][rows][interleave].
struct Packed {
  Codec codec;
  const uint8_t* upper;
  const uint8_t* lower;
  const int8_t* row_shift;
  int64_t rows;
  int64_t columns;
  int64_t interleave;
  uint16_t* out;
  bool bf16;
};

// Packed weights: blocks of 32 rows with pairs of columns interleaved, [N/32][K/2][32][2].
constexpr int64_t kPanelRows = 32;
constexpr int64_t kTileTokens = 16;
// Sums in scratch at once: their activations and they themselves stay in the L2 cache.
constexpr int64_t kBlockTokens = 512;
constexpr int64_t kBlockPanels = 8;
// The longest run of columns decoded at once.
constexpr int64_t kChunkColumns = 256;

// Packed activations: bfloat16 in tiles of up to 16 tokens, [tokens / 16][columns / 32][tokens of
// the tile][32]. One token is a plain row.
constexpr int64_t tile_index(int64_t token, int64_t column_block, int64_t tokens, int64_t columns) {
  const int64_t first = token / kTileTokens * kTileTokens;
  const int64_t rest = tokens - first;
  const int64_t height = rest < kTileTokens ? rest : kTileTokens;
  return first * columns + (column_block * height + token - first) * kStep;
}

// As Gemm, on packed weights and activations that are packed, or few and in plain rows.
struct PackedGemm {
  Weight w;
  const uint16_t* x;
  bool plain;
  int64_t tokens;
  const float* bias;
  void* y;
  Dtype y_dtype;
  int64_t y_stride;
};

constexpr int64_t packed_scratch(int64_t tokens) {
  return kChunkColumns * kPanelRows +  // two chunks of 16-bit weights
         kBlockPanels * kPanelRows * (tokens < kBlockTokens ? tokens : kBlockTokens);
}

// What an instruction set adds that multiplies bfloat16.
struct PackedKernels {
  // `gemm` takes so many tokens in plain rows.
  int64_t plain_tokens;
  // Computes panels [first, last); `scratch` has packed_scratch() floats. The caller goes on with
  // panel `after`, whose first bytes are fetched meanwhile; it may lie in another expert's weight.
  void (*gemm)(const PackedGemm&, int64_t first, int64_t last, int64_t after, float* scratch);
  // silu(gate) * up of gate panels [first, last), at most kBlockPanels / 2; the up panels stand
  // rows / 2 below. y is packed activations.
  void (*gate)(const PackedGemm&, int64_t rows, int64_t first, int64_t last, int64_t after,
               float* scratch);
  // One token's sum of its experts' rows [position][columns] times factors, rounded to bfloat16.
  void (*combine)(const float* rows, const int64_t* position, const float* factors, int64_t top_k,
                  int64_t columns, uint16_t* out);
};

struct Kernels {
  const char* name;
  // Computes weight rows [first, last); `scratch` has gemm_scratch() floats.
  void (*gemm)(const Gemm&, int64_t first, int64_t last, float* scratch);
  // Decodes one block of `rows` rows to 16 bits; `scales` is scratch of rows * interleave floats.
  void (*decode)(const Packed&, float* scales);
  const PackedKernels* packed;  // or null
};

const Kernels& portable_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const PackedKernels& avx512_bf16_kernels();
const PackedKernels& amx_kernels();

// Fetches every cache line of [data, data + size) and folds a word of each into the result: the
// fastest way to read memory once, which is the measure of kernels that read weights once.
uint64_t read_lines(const uint8_t* data, int64_t size);

// Zeroes [data, data + size) past the caches; returns once the stores are ordered.
void zero_lines(uint8_t* data, int64_t size);

// sums[row] = sum of (w ^ w >> 29) * weights[column] over the words w of a row, modulo 2^64;
// contiguous rows.
void row_sums(const uint64_t* words, const uint64_t* weights, int64_t rows, int64_t columns,
              uint64_t* sums);

// Copies rows past the caches and sums each word on its way; returns once the stores are ordered.
void copy_rows(uint64_t* target, const uint64_t* source, const uint64_t* weights, int64_t rows,
               int64_t columns, uint64_t* sums);

// The best set this CPU runs; DPS_KERNELS_ISA=portable|avx2|avx512|avx512_bf16|amx lowers it.
const Kernels& kernels();

}  // namespace dps
