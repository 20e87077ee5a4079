// Picks the kernels once per process, by what the CPU and the operating system support.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace dps {
namespace {

// Rank of the name in DPS_KERNELS_ISA; without one nothing is lowered.
int allowed_rank() {
  const char* const names[] = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};
  const char* limit = std::getenv("DPS_KERNELS_ISA");
  if (!limit) return 4;
  for (int rank = 0; rank < 5; ++rank)
    if (!std::strcmp(limit, names[rank])) return rank;
  throw std::invalid_argument("DPS_KERNELS_ISA is '" + std::string(limit) +
                              "': use portable, avx2, avx512, avx512_bf16 or amx, or unset it");
}

#if defined(__x86_64__)

// The registers of AMX are large: Linux saves them only for processes that ask for it.
bool amx_permitted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // of arch_prctl(2)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool amx_bf16_present() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  return (edx & kAmxBf16) && (edx & kAmxTile);
}

Kernels choose() {
  const int allowed = allowed_rank();
  __builtin_cpu_init();
  const auto with = [](Kernels set, const char* name, const PackedKernels& packed) {
    set.name = name;
    set.packed = &packed;
    return set;
  };
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") &&
                    __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni");
  if (allowed >= 4 && bf16 && amx_bf16_present() && amx_permitted())
    return with(avx512_kernels(), "amx", amx_kernels());
  if (allowed >= 3 && bf16) return with(avx512_kernels(), "avx512_bf16", avx512_bf16_kernels());
  if (allowed >= 2 && avx512) return avx512_kernels();
  if (allowed >= 1 && avx2) return avx2_kernels();
  return portable_kernels();
}

#else

Kernels choose() {
  allowed_rank();
  return portable_kernels();
}

#endif

}  // namespace

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace dps
