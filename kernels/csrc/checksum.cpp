// Weighted sums of rows of words, for checksums of memory that was just copied.
#include "kernels.h"

// The loop must be vectorised, which -O2 does only where it costs no code.
#pragma GCC optimize("O3")

// The compiler makes a version for each instruction set and the loader picks one: the loop is plain.
#if defined(__x86_64__)
#define DPS_EACH_ISA __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define DPS_EACH_ISA
#endif

namespace dps {

DPS_EACH_ISA
void row_sums(const uint64_t* words, const uint64_t* weights, int64_t rows, int64_t columns,
              uint64_t* sums) {
  for (int64_t row = 0; row < rows; ++row) {
    const uint64_t* at = words + row * columns;
    uint64_t sum = 0;
    for (int64_t column = 0; column < columns; ++column) sum += at[column] * weights[column];
    sums[row] = sum;
  }
}

}  // namespace dps
