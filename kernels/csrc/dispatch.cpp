// Picks the kernels once per process, by what the CPU supports.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace dps {
namespace {

const Kernels& choose() {
#if defined(__x86_64__)
  const char* limit = std::getenv("DPS_KERNELS_ISA");
  const auto allowed = [limit](const char* isa) { return !limit || !std::strcmp(limit, isa); };
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx512 && allowed("avx512")) return avx512_kernels();
  if (avx2 && (allowed("avx2") || allowed("avx512"))) return avx2_kernels();
#endif
  return portable_kernels();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace dps
