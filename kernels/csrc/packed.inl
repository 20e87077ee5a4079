// GEMM on packed weights in bfloat16, written once; the file that includes it defines `Unit`, the
// instructions that multiply. Internal linkage throughout, see scalar.h.
//
// A chunk of one panel (32 rows) is decoded into the L1 cache and multiplied with all tokens, up to
// kBlockTokens of them. Sums are float32 and stay in memory between chunks. Each is made of the same
// operations in the same order whatever the number of tokens.
#pragma once
#include "gfni.h"
#include "turns.inl"

namespace dps {
namespace {

// With few tokens memory decides (the fewest take turns, see turns.inl): short chunks of a few panels
// are that many streams for the hardware to fetch ahead, and each plane is fetched by software as far
// ahead as the panel's next turn. With many, long chunks spare loads and stores of sums.
constexpr int64_t kFewTokens = 64;
constexpr int64_t kFewColumns = 64, kManyColumns = kChunkColumns;
constexpr int64_t kFewPanels = 2;
constexpr int64_t kFewLead = kFewColumns * kPanelRows;  // bytes

// Decodes a chunk block by block (two columns of 32 rows) between the products of the chunk before,
// and fetches what follows. So tiles and vectors work at once, memory is asked for at all times, and
// tiles are loaded long after their weights were stored: such loads cannot take them from the store
// buffer.
template <Codec C>
class Ahead {
 public:
  Ahead(const Decoder<C>& decoder, const PackedGemm& g, int64_t at, int64_t next, int64_t steps,
        uint16_t* out)
      : decoder_(decoder),
        upper_(g.w.upper + at),
        lower_(is_full(C) ? g.w.lower + at : nullptr),
        lead_(next - at),
        left_(steps * kStep / 2),
        out_(out) {}

  void work(int64_t blocks) {
    for (blocks = smaller(blocks, left_); blocks > 0; --blocks, --left_) {
      _mm_prefetch(upper_ + lead_, _MM_HINT_T0);
      if (is_full(C)) _mm_prefetch(lower_ + lead_, _MM_HINT_T0);
      decoder_(upper_, lower_, out_ + 32 * pair_, out_ + 512 + 32 * pair_);
      upper_ += 64;
      if (is_full(C)) lower_ += 64;
      if (++pair_ < kStep / 2) continue;
      pair_ = 0;
      out_ += kStep * kPanelRows;
    }
  }

 private:
  const Decoder<C> decoder_;
  const uint8_t* upper_;
  const uint8_t* lower_;
  int64_t lead_, left_, pair_ = 0;
  uint16_t* out_;
};

template <Codec C, typename U>
void panels_in_turns(U& unit, const PackedGemm& g, int64_t first, int64_t last, int64_t after,
                     int64_t begin, int64_t tokens, uint16_t* ring, float* sums) {
  const uint16_t* const x = g.x + begin * g.w.columns;
  const int64_t size = tokens * kPanelRows;
  for (; first + 2 <= last; first += 2, sums += 2 * size) {
    const int64_t next = first + 2 < last ? first + 2 : after;
    take_turns<C, 2>(unit, g, {first, 1, next - first}, x, tokens, ring, {sums, sums + size});
  }
  if (first < last)
    take_turns<C, 1>(unit, g, {first, 0, after - first}, x, tokens, ring, {sums, nullptr});
}

// sums[panel - first][token][32] of the tokens from `begin` on.
template <Codec C>
void accumulate(Unit& unit, const PackedGemm& g, int64_t first, int64_t last, int64_t after,
                int64_t begin, int64_t tokens, uint16_t* weights, float* sums) {
  if constexpr (Unit::kTurnTokens > 0) {
    if (tokens <= Unit::kTurnTokens)
      return panels_in_turns<C>(unit, g, first, last, after, begin, tokens, weights, sums);
  }
  const Decoder<C> decoder;
  const int64_t columns = g.w.columns, panel = kPanelRows * columns;
  const bool few = tokens <= kFewTokens;
  const int64_t chunk = few ? kFewColumns : kManyColumns;
  const int64_t group = few ? kFewPanels : last - first;
  const int64_t blocks = (tokens + 2 * kTileTokens - 1) / (2 * kTileTokens);
  const int64_t share = (kStep / 2 + blocks - 1) / blocks;
  struct Place {
    int64_t from, k, p;
  };
  const auto to = [&](const Place& c) { return smaller(c.from + group, last); };
  // The same columns of the next panel, else the next ones, else other panels.
  const auto place_after = [&](Place c) {
    if (++c.p < to(c)) return c;
    c.p = c.from;
    if ((c.k += chunk) < columns) return c;
    return Place{to(c), 0, to(c)};
  };
  const auto address = [&](const Place& c) { return c.p * panel + c.k * kPanelRows; };
  const auto steps = [&](const Place& c) {
    return c.p < last ? smaller(chunk, columns - c.k) / kStep : 0;
  };
  const auto ahead_of = [&](const Place& c, uint16_t* out) {
    const int64_t at = address(c);
    const int64_t next = few ? at + kFewLead : address(place_after(c));
    return Ahead<C>(decoder, g, at, next, steps(c), out);
  };
  uint16_t* now = weights;
  uint16_t* then = weights + kChunkColumns * kPanelRows;
  Place c{first, 0, first};
  ahead_of(c, now).work(kChunkColumns);
  while (c.p < last) {
    const Place next = place_after(c);
    Ahead<C> ahead = ahead_of(next, then);
    unit.multiply(g.x + begin * columns, tokens, columns, c.k, steps(c), now, share, ahead,
                  sums + (c.p - first) * tokens * kPanelRows);
    c = next;
    ahead.work(kChunkColumns);
    uint16_t* const used = now;
    now = then;
    then = used;
  }
}

void accumulate(Unit& unit, const PackedGemm& g, int64_t first, int64_t last, int64_t after,
                int64_t begin, int64_t tokens, uint16_t* weights, float* sums) {
  with_codec(g.w.codec, [&]<Codec C>() {
    accumulate<C>(unit, g, first, last, after, begin, tokens, weights, sums);
  });
}

// One token's sums of a panel, rows in order, the row shift undone.
struct Scales {
  __m512 scale[2];

  Scales(const PackedGemm& g, int64_t panel) {
    for (int h = 0; h < 2; ++h) {
      scale[h] = _mm512_set1_ps(1.0f);
      if (!g.w.row_shift) continue;
      const int8_t* shifts = g.w.row_shift + panel * kPanelRows + 16 * h;
      const __m512i shift =
          _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(shifts)));
      const __m512i exponent = _mm512_sub_epi32(_mm512_set1_epi32(127), shift);
      scale[h] = _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
    }
  }

  void apply(const float* sums, __m512 (&out)[2]) const {
    // A decoder gives rows 8i + j and 8i + 4 + j in two vectors, i and j below 4.
    const __m512 a = _mm512_loadu_ps(sums), b = _mm512_loadu_ps(sums + 16);
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    out[0] = _mm512_mul_ps(_mm512_permutex2var_ps(a, low, b), scale[0]);
    out[1] = _mm512_mul_ps(_mm512_permutex2var_ps(a, high, b), scale[1]);
  }
};

void store_bf16(uint16_t* out, __m512 value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(value));
}

// e^x by the polynomial of Cephes' expf, relative error below 2^-22.
__m512 exponential(__m512 x) {
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(88.0f));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  x = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  x = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), x);
  constexpr float kTerms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                              1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f};
  __m512 y = _mm512_set1_ps(1.9875691500e-4f);
  for (const float term : kTerms) y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(term));
  return _mm512_scalef_ps(y, n);
}

__m512 silu_times(__m512 gate, __m512 up) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 decay = exponential(_mm512_sub_ps(_mm512_setzero_ps(), gate));
  return _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(one, decay)), up);
}

// Calls `use(begin, tokens)` for blocks of tokens whose activations stay in the L2 cache.
template <typename Use>
void token_blocks(int64_t tokens, Use use) {
  for (int64_t begin = 0; begin < tokens; begin += kBlockTokens)
    use(begin, smaller(kBlockTokens, tokens - begin));
}

void packed_gemm(const PackedGemm& g, int64_t first, int64_t last, int64_t after,
                 float* scratch) {
  auto* weights = reinterpret_cast<uint16_t*>(scratch);
  float* sums = scratch + kChunkColumns * kPanelRows;
  Unit unit;
  token_blocks(g.tokens, [&](int64_t begin, int64_t tokens) {
    for (int64_t panel = first; panel < last; panel += kBlockPanels) {
      const int64_t end = smaller(panel + kBlockPanels, last);
      accumulate(unit, g, panel, end, end < last ? end : after, begin, tokens, weights, sums);
      for (int64_t p = panel; p < end; ++p) {
        const Scales scales(g, p);
        __m512 bias[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        if (g.bias)
          for (int h = 0; h < 2; ++h) bias[h] = _mm512_loadu_ps(g.bias + p * kPanelRows + 16 * h);
        for (int64_t token = 0; token < tokens; ++token) {
          __m512 value[2];
          scales.apply(sums + ((p - panel) * tokens + token) * kPanelRows, value);
          const int64_t index = (begin + token) * g.y_stride + p * kPanelRows;
          for (int h = 0; h < 2; ++h) {
            value[h] = _mm512_add_ps(value[h], bias[h]);
            if (g.y_dtype == Dtype::Fp32) {
              _mm512_storeu_ps(static_cast<float*>(g.y) + index + 16 * h, value[h]);
            } else {
              store_bf16(static_cast<uint16_t*>(g.y) + index + 16 * h, value[h]);
            }
          }
        }
      }
    }
  });
}

// As accumulate, of gate panels and of the up panels `half` below them.
void gate_and_up(Unit& unit, const PackedGemm& g, int64_t half, int64_t first, int64_t last,
                 int64_t after, int64_t begin, int64_t tokens, uint16_t* weights, float* sums,
                 float* up_sums) {
  with_codec(g.w.codec, [&]<Codec C>() {
    if constexpr (Unit::kTurnTokens > 0) {
      if (tokens <= Unit::kTurnTokens) {
        for (int64_t p = first; p < last; ++p) {
          const int64_t index = (p - first) * tokens * kPanelRows;
          const int64_t next = p + 1 < last ? 1 : after - p;
          take_turns<C, 2>(unit, g, {p, half, next}, g.x + begin * g.w.columns, tokens, weights,
                           {sums + index, up_sums + index});
        }
        return;
      }
    }
    accumulate<C>(unit, g, first, last, last, begin, tokens, weights, sums);
    accumulate<C>(unit, g, half + first, half + last, half + last, begin, tokens, weights, up_sums);
  });
}

void packed_gate(const PackedGemm& g, int64_t rows, int64_t first, int64_t last, int64_t after,
                 float* scratch) {
  auto* weights = reinterpret_cast<uint16_t*>(scratch);
  float* sums = scratch + kChunkColumns * kPanelRows;
  const int64_t half = rows / kPanelRows / 2;
  Unit unit;
  token_blocks(g.tokens, [&](int64_t begin, int64_t tokens) {
    const int64_t panels = last - first;
    float* up_sums = sums + panels * tokens * kPanelRows;
    gate_and_up(unit, g, half, first, last, after, begin, tokens, weights, sums, up_sums);
    for (int64_t p = 0; p < panels; ++p) {
      const Scales gate_scales(g, first + p), up_scales(g, half + first + p);
      for (int64_t token = 0; token < tokens; ++token) {
        __m512 gate[2], up[2];
        gate_scales.apply(sums + (p * tokens + token) * kPanelRows, gate);
        up_scales.apply(up_sums + (p * tokens + token) * kPanelRows, up);
        uint16_t* out = static_cast<uint16_t*>(g.y) +
                        tile_index(begin + token, first + p, g.tokens, half * kPanelRows);
        for (int h = 0; h < 2; ++h) store_bf16(out + 16 * h, silu_times(gate[h], up[h]));
      }
    }
  });
}

void combine(const float* rows, const int64_t* position, const float* factors, int64_t top_k,
             int64_t columns, uint16_t* out) {
  for (int64_t n = 0; n < columns; n += 16) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < top_k; ++i)
      sum = _mm512_fmadd_ps(_mm512_set1_ps(factors[i]),
                            _mm512_loadu_ps(rows + position[i] * columns + n), sum);
    store_bf16(out + n, sum);
  }
}

}  // namespace
}  // namespace dps
