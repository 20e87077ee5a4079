// AVX-512 F + BW + VL. Thirty-two weights a step: each plane widens to sixteen bits a lane.
#include <immintrin.h>

#include "scalar.h"

namespace dps {
namespace {

struct V {
  using F = __m512;
  static constexpr int width = 16;
  static constexpr int tile_rows = 6;  // 4 x 6 sums + 6 weights + 1 activation of 32 registers

  static F zero() { return _mm512_setzero_ps(); }
  static F set(float value) { return _mm512_set1_ps(value); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static void sum4(F a, F b, F c, F d, float* out) {
    out[0] = _mm512_reduce_add_ps(a);
    out[1] = _mm512_reduce_add_ps(b);
    out[2] = _mm512_reduce_add_ps(c);
    out[3] = _mm512_reduce_add_ps(d);
  }
  static uint16_t to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
  static void store_fp16(uint16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store_bf16(uint16_t* p, F a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i carry = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, carry), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i half = _mm512_mask_blend_epi32(nan, rounded, _mm512_set1_epi32(0x7FC0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(half));
  }

  static __m512i widen(const uint8_t* plane) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane)));
  }

  // FP16 bits of 32 weights, in order.
  template <Codec C>
  static __m512i bits(const uint8_t* upper, const uint8_t* lower) {
    const __m512i u = widen(upper);
    const __m512i code = _mm512_slli_epi16(u, 8);
    if constexpr (C == Codec::E4m3Full) {
      const __m512i l = widen(lower);
      const __m512i truncated = _mm512_sub_epi16(u, _mm512_srli_epi16(l, 7));
      const __m512i magnitude =
          _mm512_and_si512(_mm512_slli_epi16(truncated, 7), _mm512_set1_epi16(0x3F00));
      const __m512i sign = _mm512_and_si512(code, _mm512_set1_epi16(static_cast<short>(0x8000)));
      return _mm512_or_si512(_mm512_or_si512(sign, magnitude), l);
    } else if constexpr (C == Codec::E5m2Full) {
      return _mm512_sub_epi16(_mm512_or_si512(code, widen(lower)), _mm512_set1_epi16(0x80));
    } else if constexpr (C == Codec::E4m3Fast) {
      // The arithmetic shift keeps the sign in place; the mask drops its copy below.
      return _mm512_and_si512(_mm512_srai_epi16(code, 1),
                              _mm512_set1_epi16(static_cast<short>(0xBF80)));
    } else {
      return code;
    }
  }

  template <Codec C>
  static void join(const uint8_t* upper, const uint8_t* lower, uint16_t* out) {
    _mm512_storeu_si512(out, bits<C>(upper, lower));
  }

  template <Codec C>
  static void decode(const uint8_t* upper, const uint8_t* lower, F* out) {
    const __m256i* source = reinterpret_cast<const __m256i*>(upper);
    if constexpr (C == Codec::Fp16) {
      out[0] = _mm512_cvtph_ps(_mm256_loadu_si256(source));
      out[1] = _mm512_cvtph_ps(_mm256_loadu_si256(source + 1));
    } else if constexpr (C == Codec::Bf16) {
      for (int v = 0; v < 2; ++v) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(source + v));
        out[v] = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
      }
    } else {
      const __m512i joined = bits<C>(upper, lower);
      out[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(joined));
      out[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(joined, 1));
    }
  }
};

}  // namespace
}  // namespace dps

#include "generic.inl"

namespace dps {
const Kernels& avx512_kernels() {
  static const Kernels set{"avx512", gemm, decode, nullptr};
  return set;
}
}  // namespace dps
