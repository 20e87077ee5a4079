// AVX2 + FMA + F16C. Thirty-two weights a step: the two planes are interleaved with byte unpacks,
// which put weights 0-7 and 16-23 in one register and 8-15 and 24-31 in the other.
#include <immintrin.h>

#include "scalar.h"

namespace dps {
namespace {

struct V {
  using F = __m256;
  static constexpr int width = 8;
  static constexpr int tile_rows = 3;  // 4 x 3 sums + 3 weights + 1 activation = 16 registers

  static F zero() { return _mm256_setzero_ps(); }
  static F set(float value) { return _mm256_set1_ps(value); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F a) { _mm256_storeu_ps(p, a); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static void sum4(F a, F b, F c, F d, float* out) {
    const __m256 halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
  }
  static uint16_t to_half(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
  static void store_fp16(uint16_t* p, F a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  }
  static void store_bf16(uint16_t* p, F a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i carry = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, carry), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    const __m256i half = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packus_epi32(_mm256_castsi256_si128(half),
                                      _mm256_extracti128_si256(half, 1)));
  }

  struct Pair {
    __m256i even;  // FP16 bits of weights 0-7 and 16-23
    __m256i odd;   // of weights 8-15 and 24-31
  };

  template <Codec C>
  static Pair pair(const uint8_t* upper, const uint8_t* lower) {
    const __m256i zeros = _mm256_setzero_si256();
    const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(upper));
    if constexpr (C == Codec::E4m3Full) {
      const __m256i l = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lower));
      // The comparison is -1 where the low byte's top bit is set: the rounding to take back.
      const __m256i truncated = _mm256_add_epi8(u, _mm256_cmpgt_epi8(zeros, l));
      const __m256i magnitude =
          _mm256_and_si256(_mm256_srli_epi16(truncated, 1), _mm256_set1_epi8(0x3F));
      const __m256i sign = _mm256_and_si256(u, _mm256_set1_epi8(static_cast<char>(0x80)));
      const __m256i high = _mm256_or_si256(sign, magnitude);
      return {_mm256_unpacklo_epi8(l, high), _mm256_unpackhi_epi8(l, high)};
    } else if constexpr (C == Codec::E5m2Full) {
      const __m256i l = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lower));
      const __m256i bias = _mm256_set1_epi16(0x80);
      return {_mm256_sub_epi16(_mm256_unpacklo_epi8(l, u), bias),
              _mm256_sub_epi16(_mm256_unpackhi_epi8(l, u), bias)};
    } else if constexpr (C == Codec::E4m3Fast) {
      // The arithmetic shift keeps the sign in place; the mask drops its copy below.
      const __m256i mask = _mm256_set1_epi16(static_cast<short>(0xBF80));
      return {_mm256_and_si256(_mm256_srai_epi16(_mm256_unpacklo_epi8(zeros, u), 1), mask),
              _mm256_and_si256(_mm256_srai_epi16(_mm256_unpackhi_epi8(zeros, u), 1), mask)};
    } else {
      return {_mm256_unpacklo_epi8(zeros, u), _mm256_unpackhi_epi8(zeros, u)};
    }
  }

  template <Codec C>
  static void join(const uint8_t* upper, const uint8_t* lower, uint16_t* out) {
    const Pair bits = pair<C>(upper, lower);
    __m256i* target = reinterpret_cast<__m256i*>(out);
    _mm256_storeu_si256(target, _mm256_permute2x128_si256(bits.even, bits.odd, 0x20));
    _mm256_storeu_si256(target + 1, _mm256_permute2x128_si256(bits.even, bits.odd, 0x31));
  }

  template <Codec C>
  static void decode(const uint8_t* upper, const uint8_t* lower, F* out) {
    const __m128i* source = reinterpret_cast<const __m128i*>(upper);
    if constexpr (C == Codec::Fp16) {
      for (int v = 0; v < 4; ++v) out[v] = _mm256_cvtph_ps(_mm_loadu_si128(source + v));
    } else if constexpr (C == Codec::Bf16) {
      for (int v = 0; v < 4; ++v) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(source + v));
        out[v] = _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
      }
    } else {
      const Pair bits = pair<C>(upper, lower);
      out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(bits.even));
      out[1] = _mm256_cvtph_ps(_mm256_castsi256_si128(bits.odd));
      out[2] = _mm256_cvtph_ps(_mm256_extracti128_si256(bits.even, 1));
      out[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(bits.odd, 1));
    }
  }
};

}  // namespace
}  // namespace dps

#include "generic.inl"

namespace dps {
const Kernels& avx2_kernels() {
  static const Kernels set{"avx2", gemm, decode, nullptr};
  return set;
}
}  // namespace dps
