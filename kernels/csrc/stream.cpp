// Memory at the speed of the machine: read once, which is what kernels are measured against, and
// zeroed.
#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "kernels.h"

namespace dps {
namespace {

constexpr int64_t kLine = 64;
// One thread keeps more lines in flight over several streams than over one, and the hardware
// prefetcher stops at page ends.
constexpr int64_t kStreams = 8;
constexpr int64_t kAhead = 1024;

uint64_t word(const uint8_t* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

}  // namespace

uint64_t read_lines(const uint8_t* data, int64_t size) {
  const int64_t length = size / kStreams / kLine * kLine;
  uint64_t folded = 0;
  for (int64_t i = 0; i < length; i += kLine) {
    for (int64_t stream = 0; stream < kStreams; ++stream) {
      const uint8_t* at = data + stream * length + i;
      __builtin_prefetch(at + kAhead);
      folded ^= word(at);
    }
  }
  for (int64_t i = kStreams * length; i + 8 <= size; i += kLine) folded ^= word(data + i);
  return folded;
}

void zero_lines(uint8_t* data, int64_t size) {
#if defined(__x86_64__)
  // Past the caches: lines are not fetched only to be overwritten, and other lines stay in them.
  const int64_t head = std::min<int64_t>(size, -reinterpret_cast<uintptr_t>(data) % kLine);
  std::memset(data, 0, head);
  data += head, size -= head;
  const __m128i zero = _mm_setzero_si128();
  for (; size >= kLine; data += kLine, size -= kLine) {
    for (int64_t part = 0; part < kLine; part += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(data + part), zero);
    }
  }
  _mm_sfence();
#endif
  std::memset(data, 0, size);
}

}  // namespace dps
