// The walk's kernels, compiled once for all attention operations.
#include "attention/in_order.h"
#include "attention/planes.h"
#include "attention/soften.h"
#include "attention/walk.h"

namespace modulm {

template <class Math>
Walk<Math>::Walk(const Problem& p, const Tile& tile, int64_t head, int64_t heads)
    : p(p), tile(tile), first_head(head), heads(heads), head(head) {
  start = p.query_starts[tile.sequence];
  length = p.context_lens[tile.sequence];
  base = length - (p.query_starts[tile.sequence + 1] - start);
  masked = p.masks && p.masks[start];
  turns = in_turn(p.cache, tile.rows);
  padded = p.cache.latent ? query_columns() : padded_rows(kPlanes * tile.rows);
  lines = p.cache.size / Math::width;
  query_stride = p.cache.size + 64 / int64_t(sizeof(Element));
  take_memory();
  with_float(p.dtype, [&](auto t) {
    for (int64_t i = heads - 1; i >= 0; i--) {
      take_head(i);
      load_queries(static_cast<const decltype(t)*>(p.q));
    }
  });
  if (p.cache.latent) transpose_queries();
}

template <class Math>
void Walk<Math>::split(int64_t index, const State& state) {
  origin = index * kSplit;
  seen = pieces(tile, index);
  if (at_once()) find(seen);
  if constexpr (!kFixed)
    if (p.cache.latent) add_latent_scores();
  for (group = 0; group < tile.rows; group += kGroupRows) attend(state);
}

template <class Math>
template <class T>
void Walk<Math>::deliver_as(const State& state, T* out) const {
  for (int r = 0; r < tile.rows; r++) {
    int64_t h = query_head(r);
    float factor = 1.0f;
    if (p.sinks) {
      float sink = p.sinks[h] * kLog2E, peak = std::max(state.peak[r], sink);
      factor = decay(state.peak[r], peak);
      state.total[r] = state.total[r] * factor + decay(sink, peak);
    }
    factor = state.total[r] == 0.0f ? 0.0f : factor / state.total[r];
    T* to = out + ((start + token(r)) * p.heads + h) * p.value_size;
    for_lanes(p.value_size, [&](int64_t i, int n) {
      store_n(to + i, load(state.row(r) + i) * factor, n);
    });
  }
}

template <class Math>
void Walk<Math>::deliver(const State& states) {
  with_float(p.dtype, [&](auto t) {
    for (int64_t i = 0; i < heads; i++) {
      take_head(i);
      deliver_as(state_of(i, states), static_cast<decltype(t)*>(p.out));
    }
  });
}

// Not whole classes: their other functions are parts of these.
#define MODULM_WALK(Math)                                                   \
  template Walk<Math>::Walk(const Problem&, const Tile&, int64_t, int64_t); \
  template void Walk<Math>::split(int64_t, const State&);                   \
  template void Walk<Math>::deliver(const State&)

MODULM_WALK(PlainMath);
MODULM_WALK(PairMath);
MODULM_WALK(IntegerMath);

}  // namespace modulm
