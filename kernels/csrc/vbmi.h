// Sixty-four nested weights to bfloat16 by table look-ups in registers (AVX-512 VBMI).
//
// A bfloat16 weight keeps its value in every nested format, so that its FP16 bits turn into bfloat16
// by cutting three mantissa bits and raising the exponent by 112. Seven bits of the pair of bytes
// tell the upper byte of the result and the top of its lower byte: two look-ups. FP16 subnormals
// would need normalising; a block that holds one takes a slower way.
#pragma once
#include <immintrin.h>

#include "scalar.h"

namespace dps {
namespace {

// bfloat16 bits of a positive FP16 number with at most eight significant bits.
constexpr uint16_t bf16_of(uint32_t half) {
  if (half >= 0x400) return static_cast<uint16_t>((half >> 3) + (112u << 7));
  if (half == 0) return 0;
  uint32_t exponent = 113;
  for (; half < 0x400; half <<= 1) --exponent;
  return static_cast<uint16_t>(exponent << 7 | (half & 0x3FF) >> 3);
}

// Bytes of the result by the magnitude's seven leading bits; in full mode the rest is added later.
struct Table {
  uint8_t bytes[128];
};

template <Codec C>
constexpr Table table(int shift) {
  Table out{};
  for (uint32_t i = 0; i < 128; ++i) {
    uint32_t half = C == Codec::E4m3Fast ? i << 7 : i << 8;
    if (C == Codec::E4m3Full) half = i >> 1 << 8;
    const bool subnormal = is_full(C) && half < 0x400;
    out.bytes[i] = subnormal ? 0 : static_cast<uint8_t>(bf16_of(half) >> shift);
  }
  return out;
}

template <Codec C>
class Decoder {
 public:
  // Results are 2 x 32 values: bytes 16i + 8h + j of the planes become value 8i + j of `out[h]`.
  void operator()(const uint8_t* upper, const uint8_t* lower, uint16_t* first,
                  uint16_t* second) const {
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    __m512i leading = _mm512_loadu_si512(upper);
    __m512i rest;
    if constexpr (is_full(C)) {
      rest = _mm512_loadu_si512(lower);
      const __mmask64 parity = _mm512_movepi8_mask(rest);
      const __mmask64 carried = C == Codec::E4m3Full ? parity : ~parity;
      leading = _mm512_mask_add_epi8(leading, carried, leading, _mm512_set1_epi8(-1));
      if constexpr (C == Codec::E5m2Full) rest = _mm512_xor_si512(rest, sign);
      constexpr char kNormal = C == Codec::E4m3Full ? 0x78 : 0x7C;
      if (__builtin_expect(_mm512_testn_epi8_mask(leading, _mm512_set1_epi8(kNormal)) != 0, 0))
        return with_subnormals(leading, rest, first, second);
    }
    __m512i high = _mm512_permutex2var_epi8(high0_, leading, high1_);
    __m512i low = _mm512_permutex2var_epi8(low0_, leading, low1_);
    high = _mm512_ternarylogic_epi32(high, leading, sign, 0xF8);  // high | (leading & sign)
    if constexpr (is_full(C))
      low = _mm512_ternarylogic_epi32(low, _mm512_srli_epi16(rest, 3), _mm512_set1_epi8(0x1F), 0xF8);
    _mm512_store_si512(first, _mm512_unpacklo_epi8(low, high));
    _mm512_store_si512(second, _mm512_unpackhi_epi8(low, high));
  }

 private:
  __attribute__((noinline)) static void with_subnormals(__m512i leading, __m512i rest,
                                                        uint16_t* first, uint16_t* second) {
    __m512i high = leading;
    if constexpr (C == Codec::E4m3Full) {
      const __m512i magnitude =
          _mm512_and_si512(_mm512_srli_epi16(leading, 1), _mm512_set1_epi8(0x3F));
      const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
      high = _mm512_ternarylogic_epi32(magnitude, leading, sign, 0xF8);
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

  static constexpr Table kHigh = table<C>(8), kLow = table<C>(0);
  const __m512i high0_ = _mm512_loadu_si512(kHigh.bytes);
  const __m512i high1_ = _mm512_loadu_si512(kHigh.bytes + 64);
  const __m512i low0_ = _mm512_loadu_si512(kLow.bytes);
  const __m512i low1_ = _mm512_loadu_si512(kLow.bytes + 64);
};

}  // namespace
}  // namespace dps
