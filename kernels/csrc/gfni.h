// Sixty-four nested weights to bfloat16 by bit matrices (AVX-512 GFNI and VBMI).
//
// A bfloat16 weight keeps its value in every nested format, so that its FP16 bits turn into bfloat16
// by cutting three mantissa bits and raising the exponent by 112. As exponents below 16 have a zero
// on top, that addition only copies and inverts bits: each byte of the result is a bit matrix times
// a byte of the weight. FP16 subnormals need normalising: a block that holds one takes a slower way,
// which in fast mode is a look-up.
#pragma once
#include <immintrin.h>

#include "scalar.h"

namespace dps {
namespace {

// For _mm512_gf2p8affine_epi64_epi8: which bits of a byte make bits 7, 6, ... 0 of the result.
constexpr int64_t bit_matrix(const uint8_t (&rows)[8]) {
  uint64_t matrix = 0;
  for (int i = 0; i < 8; ++i) matrix |= uint64_t{rows[i]} << 8 * i;
  return static_cast<int64_t>(matrix);
}

// bfloat16 bits of a positive FP16 number with at most eight significant bits.
constexpr uint16_t bf16_of(uint32_t half) {
  if (half == 0) return 0;
  uint32_t exponent = 113;
  for (; half < 0x400; half <<= 1) --exponent;
  return static_cast<uint16_t>(exponent << 7 | (half & 0x3FF) >> 3);
}

// Upper (shift 8) or lower bytes of the eight smallest magnitudes of FP8, `step` apart as FP16 bits.
constexpr int64_t smallest(uint32_t step, int shift) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < 8; ++i)
    bytes |= uint64_t{static_cast<uint8_t>(bf16_of(i * step) >> shift)} << 8 * i;
  return static_cast<int64_t>(bytes);
}

template <Codec C>
class Decoder {
 public:
  // Results are 2 x 32 values: bytes 16i + 8h + j of the planes become value 8i + j of `out[h]`.
  void operator()(const uint8_t* upper, const uint8_t* lower, uint16_t* first,
                  uint16_t* second) const {
    __m512i leading = _mm512_loadu_si512(upper);
    __m512i rest = leading;
    if constexpr (is_full(C)) {
      rest = _mm512_loadu_si512(lower);
      const __mmask64 parity = _mm512_movepi8_mask(rest);
      leading = _mm512_mask_add_epi8(leading, kE4m3 ? parity : ~parity, leading,
                                     _mm512_set1_epi8(-1));
      if constexpr (!kE4m3) rest = _mm512_xor_si512(rest, sign());
    }
    constexpr char kExponent = kE4m3 ? 0x78 : 0x7C;
    const __mmask64 subnormal = _mm512_testn_epi8_mask(leading, _mm512_set1_epi8(kExponent));
    if constexpr (is_full(C))
      if (__builtin_expect(subnormal != 0, 0)) return with_subnormals(leading, rest, first, second);
    __m512i high =
        _mm512_gf2p8affine_epi64_epi8(leading, _mm512_set1_epi64(kHigh), kRaisedExponent);
    __m512i low = _mm512_gf2p8affine_epi64_epi8(leading, _mm512_set1_epi64(kLow), 0);
    if constexpr (is_full(C)) {
      low = _mm512_ternarylogic_epi32(low, _mm512_srli_epi16(rest, 3), _mm512_set1_epi8(0x1F), 0xF8);
    } else {
      constexpr int kStepShift = kE4m3 ? 7 : 8;
      if (__builtin_expect(subnormal != 0, 0)) {
        high = _mm512_mask_permutexvar_epi8(high, subnormal, leading,
                                            _mm512_set1_epi64(smallest(1u << kStepShift, 8)));
        low = _mm512_mask_permutexvar_epi8(low, subnormal, leading,
                                           _mm512_set1_epi64(smallest(1u << kStepShift, 0)));
      }
      high = _mm512_ternarylogic_epi32(high, leading, sign(), 0xF8);  // high | (leading & sign)
    }
    _mm512_store_si512(first, _mm512_unpacklo_epi8(low, high));
    _mm512_store_si512(second, _mm512_unpackhi_epi8(low, high));
  }

 private:
  static constexpr bool kE4m3 = C == Codec::E4m3Full || C == Codec::E4m3Fast;
  // `leading` is sign, four exponent bits and three more of E4M3, where the last counts in fast
  // mode alone; or the upper byte of FP16 bits: sign, five exponent bits and two more.
  static constexpr int64_t kHigh = kE4m3 ? bit_matrix({0x80, 0, 0, 0, 0, 0x40, 0x20, 0x10})
                                         : bit_matrix({0x80, 0x40, 0x40, 0x40, 0x40, 0x20, 0x10, 8});
  static constexpr int64_t kLow =
      kE4m3 ? bit_matrix({8, 4, 2, is_full(C) ? uint8_t{0} : uint8_t{1}, 0, 0, 0, 0})
            : bit_matrix({4, 2, 1, 0, 0, 0, 0, 0});
  static constexpr int kRaisedExponent = 0x38;  // bits that are set, or inverted, in the upper byte

  static __m512i sign() { return _mm512_set1_epi8(static_cast<char>(0x80)); }

  __attribute__((noinline)) static void with_subnormals(__m512i leading, __m512i rest,
                                                        uint16_t* first, uint16_t* second) {
    __m512i high = leading;
    if constexpr (kE4m3) {
      const __m512i magnitude =
          _mm512_and_si512(_mm512_srli_epi16(leading, 1), _mm512_set1_epi8(0x3F));
      high = _mm512_ternarylogic_epi32(magnitude, leading, sign(), 0xF8);
    }
    store(_mm512_unpacklo_epi8(rest, high), first);
    store(_mm512_unpackhi_epi8(rest, high), second);
  }

  static void store(__m512i halves, uint16_t* out) {
    const auto narrow = [](__m256i half) {
      return _mm512_cvtepi32_epi16(
          _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtph_ps(half)), 16));
    };
    const __m256i low = narrow(_mm512_castsi512_si256(halves));
    const __m256i high = narrow(_mm512_extracti64x4_epi64(halves, 1));
    _mm512_store_si512(out, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }
};

}  // namespace
}  // namespace dps
