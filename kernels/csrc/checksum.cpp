// Weighted sums of rows of words, for checksums of memory that was just copied.
#include <cstring>

#include "kernels.h"

// The loop must be vectorised, which -O2 does only where it costs no code.
#pragma GCC optimize("O3")

// The compiler makes a version for each instruction set and the loader picks one: the loop is plain.
#if defined(__x86_64__)
#include <emmintrin.h>
#define DPS_EACH_ISA __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define DPS_EACH_ISA
#endif

namespace dps {

namespace {

constexpr int64_t kLineWords = 8;
constexpr uintptr_t kLineBytes = kLineWords * sizeof(uint64_t);
constexpr int64_t kRowsAhead = 2;
constexpr int kMixShift = 29;

// Brings the upper bits down: a product modulo 2^64 forgets most of what a weight does to them.
// The shift is odd, so that bytes that all change alike do not cancel here.
inline __attribute__((always_inline)) uint64_t mixed(uint64_t word) {
  return word ^ (word >> kMixShift);
}

// Inlined into each version below, so that it is compiled for the same instruction set.
inline __attribute__((always_inline)) uint64_t weighted(const uint64_t* row,
                                                        const uint64_t* weights, int64_t columns) {
  uint64_t sum = 0;
  for (int64_t column = 0; column < columns; ++column) {
    sum += mixed(row[column]) * weights[column];
  }
  return sum;
}

// Writes a whole line past the caches: the line is not fetched only to be overwritten, and what the
// forward passes beside the copy keep in the caches stays there.
inline __attribute__((always_inline)) void store_line(uint64_t* to, const uint64_t* from) {
#if defined(__x86_64__)
  for (int64_t word = 0; word < kLineWords; word += 2) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + word),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + word)));
  }
#else
  std::memcpy(to, from, kLineBytes);
#endif
}

// Streamed stores are not ordered with later ones of this thread, by which it reports the copy.
inline void order_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

inline bool starts_line(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kLineBytes == 0;
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
  if (!starts_line(target) || columns % kLineWords) {
    std::memcpy(target, source, rows * columns * sizeof *target);
    row_sums(target, weights, rows, columns, sums);
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    uint64_t* to = target + row * columns;
    const uint64_t* from = source + row * columns;
    uint64_t sum[kLineWords] = {};
    for (int64_t column = 0; column < columns; column += kLineWords) {
      // The hardware's own prefetching starts anew at each page, which is a row. Past the end this
      // fetches nothing that matters.
      __builtin_prefetch(from + kRowsAhead * columns + column);
      for (int64_t word = 0; word < kLineWords; ++word) {
        sum[word] += mixed(from[column + word]) * weights[column + word];
      }
      store_line(to + column, from + column);
    }
    sums[row] = 0;
    for (const uint64_t part : sum) sums[row] += part;
  }
  order_stores();
}

}  // namespace dps
