// Any CPU: the compiler's own vectors, lowered to the baseline instruction set.
#include "scalar.h"

namespace dps {
namespace {

struct V {
  static constexpr int width = 8;
  static constexpr int tile_rows = 2;

  typedef float F __attribute__((vector_size(32)));

  static F set(float value) { return F{} + value; }
  static F zero() { return F{}; }
  static F load(const float* p) {
    F out;
    std::memcpy(&out, p, sizeof(out));
    return out;
  }
  static void store(float* p, F a) { std::memcpy(p, &a, sizeof(a)); }
  static F mul(F a, F b) { return a * b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static float sum(F a) {
    return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]));
  }
  static void sum4(F a, F b, F c, F d, float* out) {
    out[0] = sum(a);
    out[1] = sum(b);
    out[2] = sum(c);
    out[3] = sum(d);
  }
  static uint16_t to_half(float value) { return to_fp16(value); }
  static void store_fp16(uint16_t* p, F a) {
    for (int i = 0; i < width; ++i) p[i] = to_fp16(a[i]);
  }
  static void store_bf16(uint16_t* p, F a) {
    for (int i = 0; i < width; ++i) p[i] = to_bf16(a[i]);
  }

  template <Codec C>
  static void join(const uint8_t* upper, const uint8_t* lower, uint16_t* out) {
    for (int i = 0; i < kStep; ++i) out[i] = dps::join<C>(upper[i], lower[i]);
  }

  template <Codec C>
  static void decode(const uint8_t* upper, const uint8_t* lower, F* out) {
    uint16_t bits[kStep];
    if constexpr (C == Codec::Fp16 || C == Codec::Bf16) {
      std::memcpy(bits, upper, sizeof(bits));
    } else {
      join<C>(upper, lower, bits);
    }
    float values[kStep];
    for (int i = 0; i < kStep; ++i)
      values[i] = C == Codec::Bf16 ? from_bf16(bits[i]) : from_fp16(bits[i]);
    for (int v = 0; v < kStep / width; ++v) out[v] = load(values + v * width);
  }
};

}  // namespace
}  // namespace dps

#include "generic.inl"

namespace dps {
const Kernels& portable_kernels() {
  static const Kernels set{"portable", gemm, decode, nullptr};
  return set;
}
}  // namespace dps
