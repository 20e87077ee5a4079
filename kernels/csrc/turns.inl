// Few tokens on packed weights, where memory decides: two panels take turns step by step while their
// sums stay in the unit for all columns. Sums that wait in memory between the turns would be read
// back right after they were stored; that wait fills the reorder buffer, and no memory is asked for
// meanwhile. Internal linkage throughout, see scalar.h.
#pragma once
#include "gfni.h"

namespace dps {
namespace {

// Runs `run` with the codec as a template argument.
template <typename Run>
void with_codec(Codec codec, Run run) {
  switch (codec) {
    case Codec::E4m3Full: return run.template operator()<Codec::E4m3Full>();
    case Codec::E4m3Fast: return run.template operator()<Codec::E4m3Fast>();
    case Codec::E5m2Full: return run.template operator()<Codec::E5m2Full>();
    case Codec::E5m2Fast: return run.template operator()<Codec::E5m2Fast>();
    default: return;  // ordinary 16-bit weights are not packed
  }
}

// Bytes of a plane that are asked for ahead of their use, into the L2 cache. At the end of a panel
// they are those of the panel that takes its place. A line that is not asked for is waited for.
constexpr int64_t kTurnLead = 4096;

// Steps of decoded weights that are kept: tiles are loaded long after their weights were stored.
constexpr int64_t kRingSteps = 3;

// Panels that take turns: `first` and the one `apart` from it, or `first` alone; afterwards those
// `next` further on take their places.
struct Turns {
  int64_t first, apart, next;
};

// sums[i] of panel i becomes [tokens][32]; `ring` has room for kRingSteps steps of the panels.
template <Codec C, int Panels, typename U>
void take_turns(U& unit, const PackedGemm& g, const Turns& turns, const uint16_t* x, int64_t tokens,
                uint16_t* ring, float* const (&sums)[2]) {
  const Decoder<C> decoder;
  constexpr int64_t step_bytes = kStep * kPanelRows;
  const int64_t panel = kPanelRows * g.w.columns, steps = g.w.columns / kStep;
  const int64_t next_tokens = g.plain ? kStep : kStep * tokens;
  const int64_t row_bytes = sizeof(uint16_t) * (g.plain ? g.w.columns : kStep);
  const uint8_t* const upper = g.w.upper + turns.first * panel;
  const uint8_t* const lower = is_full(C) ? g.w.lower + turns.first * panel : nullptr;
  const auto place = [&](int64_t step, int of) {
    return ring + (step % kRingSteps * Panels + of) * step_bytes;
  };
  const auto decode = [&](int64_t step, int of) {
    const int64_t at = of * turns.apart * panel + step * step_bytes;
    const bool over = step * step_bytes + kTurnLead >= panel;
    const int64_t lead = kTurnLead + (over ? (turns.next - 1) * panel : 0);
    uint16_t* const out = place(step, of);
#pragma GCC unroll 4
    for (int64_t block = 0; block < kStep / 2; ++block) {
      const int64_t from = at + 64 * block;
      _mm_prefetch(upper + from + lead, _MM_HINT_T1);
      if (is_full(C)) _mm_prefetch(lower + from + lead, _MM_HINT_T1);
      decoder(upper + from, lower + from, out + 32 * block, out + 512 + 32 * block);
    }
  };
  unit.begin(tokens);
  constexpr int64_t lead = kRingSteps - 1;
  for (int64_t step = 0; step < smaller(lead, steps); ++step)
    for (int of = 0; of < Panels; ++of) decode(step, of);
  for (int64_t step = 0; step < steps; ++step) {
    const bool more = step + lead < steps;
    unit.take_tokens(x + step * next_tokens, row_bytes);
    unit.template add<0>(place(step, 0));
    if (more) decode(step + lead, 0);
    if constexpr (Panels == 2) {
      unit.template add<1>(place(step, 1));
      if (more) decode(step + lead, 1);
    }
  }
  for (int of = 0; of < Panels; ++of) unit.give(of, sums[of]);
}

}  // namespace
}  // namespace dps
