// Scalar conversions. Everything here has internal linkage: the files that include it compile with
// different -m flags, and a shared inline function could bring AVX code onto a CPU without it.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace dps {
namespace {

constexpr bool is_full(Codec codec) { return codec == Codec::E4m3Full || codec == Codec::E5m2Full; }

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// 2^-shift for a shift that keeps it a normal number.
inline float unshift(const int8_t* row_shift, int64_t row) {
  return row_shift ? float_of(static_cast<uint32_t>(127 - row_shift[row]) << 23) : 1.0f;
}

inline float from_fp16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  uint32_t bits = (half & 0x7FFFu) << 13;
  const uint32_t exponent = bits & 0x0F800000u;
  bits += 112u << 23;
  if (exponent == 0x0F800000u) {
    bits += 112u << 23;
  } else if (exponent == 0) {
    // A subnormal is a multiple of 2^-24: let a subtraction normalise it.
    bits = bits_of(float_of(bits + (1u << 23)) - float_of(113u << 23));
  }
  return float_of(sign | bits);
}

inline uint16_t to_fp16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7C00u);
  if (magnitude < 0x38800000u) {
    // Adding 0.5 leaves the subnormal's bits, rounded to nearest even, in the low mantissa.
    return static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)));
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xFFFu + odd) >> 13));
}

inline float from_bf16(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }

inline uint16_t to_bf16(float value) {
  if (value != value) return 0x7FC0u;
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// FP16 bits of one nested element.
template <Codec C>
inline uint16_t join(uint8_t upper, uint8_t lower) {
  if (C == Codec::E4m3Full) {
    const int high = (((upper & 0x7F) - (lower >> 7)) >> 1) & 0x3F;
    return static_cast<uint16_t>(((upper & 0x80) | high) << 8 | lower);
  }
  if (C == Codec::E5m2Full) return static_cast<uint16_t>((upper << 8 | lower) - 0x80);
  if (C == Codec::E4m3Fast) {
    return static_cast<uint16_t>((upper & 0x80) << 8 | (upper & 0x7F) << 7);
  }
  return static_cast<uint16_t>(upper << 8);
}

}  // namespace
}  // namespace dps
