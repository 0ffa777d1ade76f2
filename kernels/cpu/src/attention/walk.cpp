// The walk's kernels, compiled once for all attention operations.
#include "attention/walk.h"

namespace modulm {

template <class Math>
Walk<Math>::Walk(const Problem& p, const Tile& tile, int64_t head) : p(p), tile(tile), head(head) {
  start = p.query_starts[tile.sequence];
  length = p.context_lens[tile.sequence];
  base = length - (p.query_starts[tile.sequence + 1] - start);
  masked = p.masks && p.masks[start];
  padded = p.cache.latent ? query_columns() : padded_rows(kPlanes * tile.rows);
  lines = p.cache.size / Math::width;
  query_stride = p.cache.size + 64 / int64_t(sizeof(Element));
  take_memory();
  with_float(p.dtype, [&](auto t) { load_queries(static_cast<const decltype(t)*>(p.q)); });
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
void Walk<Math>::deliver(const State& state) const {
  with_float(p.dtype, [&](auto t) { deliver_as(state, static_cast<decltype(t)*>(p.out)); });
}

// Not whole classes: their other functions are parts of these.
#define MODULM_WALK(Math)                                          \
  template Walk<Math>::Walk(const Problem&, const Tile&, int64_t); \
  template void Walk<Math>::split(int64_t, const State&);          \
  template void Walk<Math>::deliver(const State&) const

MODULM_WALK(PlainMath);
MODULM_WALK(PairMath);
MODULM_WALK(IntegerMath);

}  // namespace modulm
