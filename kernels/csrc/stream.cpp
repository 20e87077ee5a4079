// Reading memory as fast as the machine can, for measuring how near the kernels come to it.
#include <cstring>

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

}  // namespace dps
