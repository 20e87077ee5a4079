// GEMM and decoding, written once over a vector type `V` that each instruction set defines before
// including this file. Internal linkage throughout, see scalar.h.
//
// Few tokens: weights are decoded in registers and used at once; the weight bytes are the only
// traffic. Many tokens: a chunk of rows is decoded to float32 in the L1 cache and reused by all of
// them. Both add the products of one output in the same order, so a token's result does not depend
// on how many others share its batch.
#pragma once
#include "scalar.h"

namespace dps {
namespace {

constexpr int kVectors = kStep / V::width;

constexpr bool is_nested(Codec codec) { return codec != Codec::Fp16 && codec != Codec::Bf16; }
constexpr int64_t element_bytes(Codec codec) { return is_nested(codec) ? 1 : 2; }

// One row of a weight, a step at a time; the last, short step is staged through zero weights.
template <Codec C>
class Row {
 public:
  void open(const Weight& w, int64_t row) {
    upper_ = w.upper + row * w.columns * element_bytes(C);
    lower_ = is_full(C) ? w.lower + row * w.columns : rest_lower_;
    whole_ = w.columns / kStep * kStep;
    const int64_t rest = w.columns - whole_;
    if (!rest) return;
    std::memset(rest_upper_, 0, sizeof(rest_upper_));
    std::memcpy(rest_upper_, upper_ + whole_ * element_bytes(C), rest * element_bytes(C));
    if (!is_full(C)) return;
    std::memset(rest_lower_, C == Codec::E5m2Full ? 0x80 : 0, sizeof(rest_lower_));  // weight zero
    std::memcpy(rest_lower_, lower_ + whole_, rest);
  }

  // `ahead` is the distance in bytes of the weights that are decoded next in this row's place:
  // rows are often too short for the hardware to see a stream.
  void decode(int64_t k, int64_t ahead, typename V::F* out) const {
    const bool rest = k == whole_;
    __builtin_prefetch(upper_ + k * element_bytes(C) + ahead);
    if (is_full(C)) __builtin_prefetch(lower_ + k + ahead);
    V::template decode<C>(rest ? rest_upper_ : upper_ + k * element_bytes(C),
                          rest ? rest_lower_ : lower_ + k, out);
  }

 private:
  const uint8_t* upper_;
  const uint8_t* lower_;
  int64_t whole_;
  uint8_t rest_upper_[2 * kStep];
  uint8_t rest_lower_[kStep];
};

// Adds up the lanes, undoes the row shift and stores. Every sum folds its lanes in the same order.
template <int MR, int NR>
void finish(const Gemm& g, int64_t token, int64_t row, typename V::F (&sums)[MR][NR]) {
  for (int n = 0; n < NR; ++n) {
    const float scale = unshift(g.w.row_shift, row + n);
    const float bias = g.bias ? g.bias[row + n] : 0.0f;
    float values[(MR + 3) / 4 * 4];
    for (int m = 0; m < MR; m += 4)
      V::sum4(sums[m][n], sums[m + 1 < MR ? m + 1 : m][n], sums[m + 2 < MR ? m + 2 : m][n],
              sums[m + 3 < MR ? m + 3 : m][n], values + m);
    for (int m = 0; m < MR; ++m) {
      const int64_t index = (token + m) * g.y_stride + row + n;
      const float value = values[m] * scale + bias;
      switch (g.y_dtype) {
        case Dtype::Fp32: static_cast<float*>(g.y)[index] = value; break;
        case Dtype::Fp16: static_cast<uint16_t*>(g.y)[index] = V::to_half(value); break;
        case Dtype::Bf16: static_cast<uint16_t*>(g.y)[index] = to_bf16(value); break;
      }
    }
  }
}

template <Codec C, int MR, int NR>
void direct_tile(const Gemm& g, int64_t token, int64_t row) {
  typename V::F sums[MR][NR];
  for (auto& of_token : sums)
    for (auto& sum : of_token) sum = V::zero();
  Row<C> rows[NR];
  for (int n = 0; n < NR; ++n) rows[n].open(g.w, row + n);
  const float* x = g.x + token * g.x_stride;
  const int64_t ahead = NR * g.w.columns * element_bytes(C);
  for (int64_t k = 0; k < g.w.columns; k += kStep) {
#pragma GCC unroll 8
    for (int n = 0; n < NR; ++n) {
      typename V::F w[kVectors];
      rows[n].decode(k, ahead, w);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 8
        for (int m = 0; m < MR; ++m)
          sums[m][n] = V::fma(w[v], V::load(x + m * g.x_stride + k + v * V::width), sums[m][n]);
    }
  }
  finish<MR, NR>(g, token, row, sums);
}

template <Codec C, int MR, int NR>
void direct_rows(const Gemm& g, int64_t token, int64_t first, int64_t last) {
  int64_t row = first;
  for (; row + NR <= last; row += NR) direct_tile<C, MR, NR>(g, token, row);
  for (; row < last; ++row) direct_tile<C, MR, 1>(g, token, row);
}

// Sums that wait in memory between chunks of columns: one vector for each token and row.
struct Sums {
  float* memory;

  float* of(int64_t row, int64_t token) const {
    return memory + (token * kGroupRows + row) * V::width;
  }
};

// Adds the products of `depth` columns from `x` and `w` on; w has rows of kDepth floats.
template <int MR, int NR>
void chunk_tile(const float* x, int64_t x_stride, const float* w, int64_t depth, bool begin,
                const Sums& kept, int64_t row, int64_t token) {
  typename V::F sums[MR][NR];
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < NR; ++n)
      sums[m][n] = begin ? V::zero() : V::load(kept.of(row + n, token + m));
  for (int64_t k = 0; k < depth; k += V::width) {
    typename V::F rows[NR];
#pragma GCC unroll 8
    for (int n = 0; n < NR; ++n) rows[n] = V::load(w + n * kDepth + k);
#pragma GCC unroll 8
    for (int m = 0; m < MR; ++m) {
      const typename V::F activation = V::load(x + m * x_stride + k);
#pragma GCC unroll 8
      for (int n = 0; n < NR; ++n) sums[m][n] = V::fma(rows[n], activation, sums[m][n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < NR; ++n) V::store(kept.of(row + n, token + m), sums[m][n]);
}

template <int MR>
void chunk_rows(const float* x, int64_t x_stride, const float* w, int64_t rows, int64_t depth,
                bool begin, const Sums& kept, int64_t row, int64_t token) {
  int64_t n = 0;
  for (; n + V::tile_rows <= rows; n += V::tile_rows)
    chunk_tile<MR, V::tile_rows>(x, x_stride, w + n * kDepth, depth, begin, kept, row + n, token);
  for (; n < rows; ++n)
    chunk_tile<MR, 1>(x, x_stride, w + n * kDepth, depth, begin, kept, row + n, token);
}

template <int MR>
void finish_rows(const Gemm& g, int64_t first, int64_t last, const Sums& kept, int64_t begin,
                 int64_t token) {
  for (int64_t row = first; row < last; ++row) {
    typename V::F sums[MR][1];
    for (int m = 0; m < MR; ++m) sums[m][0] = V::load(kept.of(row - first, token + m));
    finish<MR, 1>(g, begin + token, row, sums);
  }
}

// Calls `use` with the tokens in fours, then with the rest: use.operator()<MR>(token).
template <typename Use>
void in_fours(int64_t tokens, Use use) {
  int64_t token = 0;
  for (; token + 4 <= tokens; token += 4) use.template operator()<4>(token);
  switch (tokens - token) {
    case 1: return use.template operator()<1>(token);
    case 2: return use.template operator()<2>(token);
    case 3: return use.template operator()<3>(token);
    default: return;
  }
}

// A chunk of kChunkRows x kDepth weights lies in the L1 cache and is used by all tokens; the same
// columns of their activations, and the sums of kGroupRows rows, lie in the L2 cache.
template <Codec C>
void chunked_rows(const Gemm& g, int64_t first, int64_t last, int64_t begin, int64_t tokens,
                  float* scratch) {
  float* const weights = scratch;
  const Sums kept{scratch + kChunkRows * kDepth};
  const int64_t ahead = kChunkRows * g.w.columns * element_bytes(C);
  for (int64_t k = 0; k < g.padded; k += kDepth) {
    const int64_t depth = smaller(kDepth, g.padded - k);
    for (int64_t row = first; row < last; row += kChunkRows) {
      const int64_t rows = smaller(kChunkRows, last - row);
      for (int64_t n = 0; n < rows; ++n) {
        Row<C> source;
        source.open(g.w, row + n);
        for (int64_t i = 0; i < depth; i += kStep) {
          typename V::F w[kVectors];
          source.decode(k + i, ahead, w);
          for (int v = 0; v < kVectors; ++v)
            V::store(weights + n * kDepth + i + v * V::width, w[v]);
        }
      }
      in_fours(tokens, [&]<int MR>(int64_t token) {
        chunk_rows<MR>(g.x + (begin + token) * g.x_stride + k, g.x_stride, weights, rows, depth, k == 0,
                       kept, row - first, token);
      });
    }
  }
  in_fours(tokens, [&]<int MR>(int64_t token) {
    finish_rows<MR>(g, first, last, kept, begin, token);
  });
}

template <Codec C>
void gemm_codec(const Gemm& g, int64_t first, int64_t last, float* scratch) {
  switch (g.tokens <= kDirectTokens ? g.tokens : 0) {
    case 1: return direct_rows<C, 1, 4>(g, 0, first, last);
    case 2: return direct_rows<C, 2, 2>(g, 0, first, last);
    case 3: return direct_rows<C, 3, 2>(g, 0, first, last);
    case 4: return direct_rows<C, 4, 2>(g, 0, first, last);
    default: break;
  }
  for (int64_t begin = 0; begin < g.tokens; begin += kManyTokens) {
    const int64_t tokens = smaller(kManyTokens, g.tokens - begin);
    for (int64_t row = first; row < last; row += kGroupRows)
      chunked_rows<C>(g, row, smaller(row + kGroupRows, last), begin, tokens, scratch);
  }
}

void gemm(const Gemm& g, int64_t first, int64_t last, float* scratch) {
  switch (g.w.codec) {
    case Codec::E4m3Full: return gemm_codec<Codec::E4m3Full>(g, first, last, scratch);
    case Codec::E4m3Fast: return gemm_codec<Codec::E4m3Fast>(g, first, last, scratch);
    case Codec::E5m2Full: return gemm_codec<Codec::E5m2Full>(g, first, last, scratch);
    case Codec::E5m2Fast: return gemm_codec<Codec::E5m2Fast>(g, first, last, scratch);
    case Codec::Fp16: return gemm_codec<Codec::Fp16>(g, first, last, scratch);
    case Codec::Bf16: return gemm_codec<Codec::Bf16>(g, first, last, scratch);
  }
}

// Rounds one step of weights times their scales to 16 bits. `scales` has one float per element
// (stride V::width) or a single one (stride 0).
template <Codec C>
void round_step(const uint8_t* upper, const uint8_t* lower, const float* scales, int64_t stride,
                bool bf16, uint16_t* out) {
  typename V::F w[kVectors];
  V::template decode<C>(upper, lower, w);
  for (int v = 0; v < kVectors; ++v) {
    const typename V::F scale = stride ? V::load(scales + v * stride) : V::set(*scales);
    const typename V::F value = V::mul(w[v], scale);
    if (bf16) {
      V::store_bf16(out + v * V::width, value);
    } else {
      V::store_fp16(out + v * V::width, value);
    }
  }
}

template <Codec C>
void decode_run(const Packed& p, int64_t start, int64_t count, const float* scales, int64_t stride) {
  const bool plain = !p.bf16 && !p.row_shift;
  const uint8_t* upper = p.upper + start;
  const uint8_t* lower = is_full(C) ? p.lower + start : p.upper;
  uint16_t* out = p.out + start;
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    if (plain) {
      V::template join<C>(upper + i, lower + i, out + i);
    } else {
      round_step<C>(upper + i, lower + i, scales + (stride ? i : 0), stride, p.bf16, out + i);
    }
  }
  for (; i < count; ++i) {
    const uint16_t half = join<C>(upper[i], lower[i]);
    const float value = plain ? 0.0f : from_fp16(half) * scales[stride ? i : 0];
    out[i] = plain ? half : p.bf16 ? to_bf16(value) : to_fp16(value);
  }
}

template <Codec C>
void decode_codec(const Packed& p, float* scales) {
  if (p.rows == 1 || !p.row_shift) {
    *scales = unshift(p.row_shift, 0);
    return decode_run<C>(p, 0, p.rows * p.columns, scales, 0);
  }
  const int64_t tile = p.rows * p.interleave;
  for (int64_t i = 0; i < tile; ++i) scales[i] = unshift(p.row_shift, i / p.interleave);
  for (int64_t start = 0; start < p.rows * p.columns; start += tile)
    decode_run<C>(p, start, tile, scales, V::width);
}

void decode(const Packed& p, float* scales) {
  switch (p.codec) {
    case Codec::E4m3Full: return decode_codec<Codec::E4m3Full>(p, scales);
    case Codec::E4m3Fast: return decode_codec<Codec::E4m3Fast>(p, scales);
    case Codec::E5m2Full: return decode_codec<Codec::E5m2Full>(p, scales);
    case Codec::E5m2Fast: return decode_codec<Codec::E5m2Fast>(p, scales);
    default: return;  // ordinary 16-bit weights need no decoding
  }
}

}  // namespace
}  // namespace dps
