// Weighted sums of rows of words, for checksums of memory that was just copied.
#include <cstring>

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

namespace {

constexpr int64_t kLineWords = 8;

// Inlined into each version below, so that it is compiled for the same instruction set.
inline __attribute__((always_inline)) uint64_t weighted(const uint64_t* row,
                                                        const uint64_t* weights, int64_t columns) {
  uint64_t sum = 0;
  for (int64_t column = 0; column < columns; ++column) sum += row[column] * weights[column];
  return sum;
}

}  // namespace

DPS_EACH_ISA
void row_sums(const uint64_t* words, const uint64_t* weights, int64_t rows, int64_t columns,
              uint64_t* sums) {
  for (int64_t row = 0; row < rows; ++row) {
    sums[row] = weighted(words + row * columns, weights, columns);
  }
}

DPS_EACH_ISA
void copy_rows(uint64_t* target, const uint64_t* source, const uint64_t* weights, int64_t rows,
               int64_t columns, uint64_t* sums) {
  for (int64_t row = 0; row < rows; ++row) {
    uint64_t* to = target + row * columns;
    const uint64_t* from = source + row * columns;
    // The hardware's own prefetching starts anew at each page, which is a row. Past the end these
    // fetch nothing that matters.
    for (int64_t column = 0; column < columns; column += kLineWords) {
      __builtin_prefetch(from + columns + column, 0);
      __builtin_prefetch(to + columns + column, 1);
    }
    std::memcpy(to, from, columns * sizeof *to);
    sums[row] = weighted(to, weights, columns);
  }
}

}  // namespace dps
