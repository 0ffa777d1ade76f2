// Selective scan (Mamba 1 and 2): state = exp(dt a) state + dt x b, y = c state + skip x, token by
// token, with dt = softplus(step + bias) and a = -exp(a_log).
//
// The elements of a state are independent; only y sums over them. So a few rows of a head's state
// stay in registers during a run of tokens. A token gets the same result alone and in a prompt:
// results do not depend on how steps split a sequence.
#include <type_traits>

#include "base/math.h"
#include "base/pool.h"
#include "base/replay.h"
#include "base/types.h"
#include "base/vec.h"
#include "recurrence/rows.h"

namespace modulm {
namespace {

constexpr int64_t kTile = 32;             // tokens whose b and c stay in the first-level cache
constexpr int64_t kNumbersPerTask = 16384;
constexpr int kMostVectors = 8;

template <class T>
struct Scan {
  Rows<T> x, step;
  const float *bias, *a_log, *skip;
  int64_t paces;  // decays per head: 1 or size
  float least, most;
  Rows<T> b, c;
  float *states, *y;
  int64_t heads, dim, size, groups;
  StateRows rows;
};

// A tile's inputs of one head in fp32: x [tokens, dim], its step sizes [tokens], and rows of its
// group's b and c, which are zero up to a whole vector.
struct Tile {
  float *x, *dt, *b, *c;
  int64_t stride;
};

// R rows of V vectors of a head's state, from its number `first` on, over a tile's tokens.
// decays: [tokens], or where a head has a decay per number [tokens, V * kLanes].
template <int V, int R>
void pass(int64_t size, int64_t dim, float* state, const float* x, const float* decays, bool paced,
          const Tile& tile, int64_t first, float skip, float* y, int64_t y_stride, int64_t tokens,
          int lanes) {
  vf held[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++)
      held[r][v] = load_n(state + r * size + v * kLanes, v == V - 1 ? lanes : kLanes);
  for (int64_t t = 0; t < tokens; t++) {
    const float* b = tile.b + t * tile.stride + first;
    const float* c = tile.c + t * tile.stride + first;
    const float* token = x + t * dim;
    float* out = y + t * y_stride;
    for (int r = 0; r < R; r++) {
      vf drive = splat(token[r] * tile.dt[t]);
      vf total{};
      for (int v = 0; v < V; v++) {
        vf fade = paced ? load(decays + (t * V + v) * kLanes) : splat(decays[t]);
        held[r][v] = held[r][v] * fade + drive * load(b + v * kLanes);
        total += held[r][v] * load(c + v * kLanes);
      }
      out[r] = (first ? out[r] : skip * token[r]) + sum(total);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++)
      store_n(state + r * size + v * kLanes, held[r][v], v == V - 1 ? lanes : kLanes);
}

template <int V, class T>
void block(const Scan<T>& s, float* state, const float* decays, const Tile& tile, int64_t first,
           float skip, float* y, int64_t tokens, int lanes) {
  constexpr int R = V > 4 ? 2 : 4;
  int64_t row = 0, stride = s.heads * s.dim;
  bool paced = s.paces > 1;
  for (; row + R <= s.dim; row += R)
    pass<V, R>(s.size, s.dim, state + row * s.size, tile.x + row, decays, paced, tile, first, skip,
               y + row, stride, tokens, lanes);
  for (; row < s.dim; row++)
    pass<V, 1>(s.size, s.dim, state + row * s.size, tile.x + row, decays, paced, tile, first, skip,
               y + row, stride, tokens, lanes);
}

// exp(dt a) for a tile's tokens, laid out as `pass` reads it. a_log: the head's.
void fill_decays(const float* a_log, bool paced, const float* dt, int64_t tokens, int64_t first,
                 int vectors, int lanes, float* decays) {
  if (!paced) {
    vf pace = vexp(splat(*a_log));
    for_lanes(tokens, [&](int64_t t, int n) { store_n(decays + t, vexp(-load_n(dt + t, n) * pace), n); });
    return;
  }
  for (int v = 0; v < vectors; v++) {
    vf pace = vexp(load_n(a_log + first + v * kLanes, v == vectors - 1 ? lanes : kLanes));
    for (int64_t t = 0; t < tokens; t++)
      store(decays + (t * vectors + v) * kLanes, vexp(pace * -dt[t]));
  }
}

// A head over the tokens [at, at + tokens) of the step; `tile` holds its group's b and c already.
template <class T>
void head_tile(const Scan<T>& s, int64_t head, int64_t at, int64_t tokens, float* state,
               const Tile& tile, float* decays) {
  for (int64_t t = 0; t < tokens; t++) {
    const T* from = s.x.at(at + t) + head * s.dim;
    for_lanes(s.dim, [&](int64_t i, int n) { store_n(tile.x + t * s.dim + i, load_n(from + i, n), n); });
    tile.dt[t] = load_one(s.step.at(at + t) + head);
  }
  for_lanes(tokens, [&](int64_t t, int n) {
    vf dt = softplus(load_n(tile.dt + t, n) + (s.bias ? s.bias[head] : 0.0f));
    dt = choose(dt < s.least, splat(s.least), dt);
    store_n(tile.dt + t, choose(dt > s.most, splat(s.most), dt), n);
  });
  float* y = s.y + (at * s.heads + head) * s.dim;
  for (int64_t first = 0; first < s.size; first += kMostVectors * kLanes) {
    int64_t left = s.size - first;
    int vectors = left >= kMostVectors * kLanes ? kMostVectors : int((left + kLanes - 1) / kLanes);
    int lanes = left >= vectors * kLanes ? kLanes : int(left - (vectors - 1) * kLanes);
    if (first == 0 || s.paces > 1)
      fill_decays(s.a_log + head * s.paces, s.paces > 1, tile.dt, tokens, first, vectors, lanes,
                  decays);
    auto run = [&](auto count) {
      block<decltype(count)::value>(s, state + first, decays, tile, first, s.skip[head], y, tokens,
                                    lanes);
    };
    switch (vectors) {
      case 1: run(std::integral_constant<int, 1>{}); break;
      case 2: run(std::integral_constant<int, 2>{}); break;
      case 3: run(std::integral_constant<int, 3>{}); break;
      case 4: run(std::integral_constant<int, 4>{}); break;
      case 5: run(std::integral_constant<int, 5>{}); break;
      case 6: run(std::integral_constant<int, 6>{}); break;
      case 7: run(std::integral_constant<int, 7>{}); break;
      default: run(std::integral_constant<int, 8>{});
    }
  }
}

// One group's b or c in fp32, with rows that end in zeros up to a whole vector.
template <class T>
void copy_rows(const Rows<T>& from, int64_t group, int64_t at, int64_t size, int64_t tokens,
               float* to, int64_t padded) {
  for (int64_t t = 0; t < tokens; t++) {
    const T* row = from.at(at + t) + group * size;
    for_lanes(size, [&](int64_t i, int n) { store_n(to + t * padded + i, load_n(row + i, n), n); });
    std::memset(to + t * padded + size, 0, (padded - size) * sizeof(float));
  }
}

// Heads [begin, end) of one group, for one row.
template <class T>
void scan_heads(const Scan<T>& s, int64_t row, int64_t begin, int64_t end) {
  int64_t each = s.dim * s.size, numbers = s.heads * each, group = begin / (s.heads / s.groups);
  int64_t padded = (s.size + kLanes - 1) / kLanes * kLanes;
  // b and c, decays (one row more than tokens: vectors of them), x, dt.
  int64_t floats = (2 * kTile + kTile + 1) * padded + kTile * (s.dim + 1) + 2 * kLanes;
  float* room = static_cast<float*>(scratch(0, floats * sizeof(float)));
  float* decays = room + 2 * kTile * padded;
  float* dt = decays + (kTile + 1) * padded;
  Tile tile{dt + kTile + kLanes, dt, room, room + kTile * padded, padded};
  const float* from = s.states + s.rows.sources[row] * numbers;
  s.rows.stretches(row, [&](int64_t first, int64_t last, int64_t slot) {
    float* state = s.states + slot * numbers;
    size_t bytes = (end - begin) * each * sizeof(float);
    if (first == 0 && s.rows.fresh[row]) std::memset(state + begin * each, 0, bytes);
    else if (from != state) std::memcpy(state + begin * each, from + begin * each, bytes);
    from = state;
    for (int64_t t = first; t < last; t += kTile) {
      int64_t tokens = last - t < kTile ? last - t : kTile, at = s.rows.starts[row] + t;
      copy_rows(s.b, group, at, s.size, tokens, tile.b, padded);
      copy_rows(s.c, group, at, s.size, tokens, tile.c, padded);
      for (int64_t head = begin; head < end; head++)
        head_tile(s, head, at, tokens, state + head * each, tile, decays);
    }
  });
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// x: [tokens, heads, dim]; step: [tokens, heads]; b, c: [tokens, groups, size], all of one dtype
// and with row strides. bias (may be null), skip: [heads]; a_log: [heads, paces]; y: [tokens, heads,
// dim]; states: [slots, heads, dim, size]; kept: [kept_count, 3], by row and then by tokens: fp32.
MODULM_API void modulm_selective_scan(
    const void* x, int64_t ldx, const void* step, int64_t lds, const float* bias, float least,
    float most, const float* a_log, int64_t paces, const void* b, int64_t ldb, const void* c,
    int64_t ldc, const float* skip, float* states, float* y, const int32_t* starts,
    const int64_t* sources, const int64_t* slots, const uint8_t* fresh, const int64_t* kept,
    int64_t kept_count, int64_t rows, int64_t heads, int64_t dim, int64_t size, int64_t groups,
    int dtype) {
  with_float(dtype, [&](auto type) {
    using T = decltype(type);
    auto as = [](const void* data, int64_t stride) {
      return Rows<T>{static_cast<const T*>(data), stride};
    };
    Scan<T> s{as(x, ldx), as(step, lds), bias, a_log, skip, paces, least, most, as(b, ldb),
              as(c, ldc), states, y, heads, dim, size, groups,
              {starts, sources, slots, fresh, reinterpret_cast<const Kept*>(kept), kept_count}};
    int64_t per_group = heads / groups, grain = kNumbersPerTask / (dim * size);
    grain = grain < 1 ? 1 : grain > per_group ? per_group : grain;
    int64_t parts = (per_group + grain - 1) / grain;
    parallel(rows * groups * parts, [&](int64_t task, int) {
      int64_t row = task / (groups * parts), group = task / parts % groups;
      int64_t begin = group * per_group + task % parts * grain, limit = (group + 1) * per_group;
      scan_heads(s, row, begin, begin + grain < limit ? begin + grain : limit);
    });
  });
}

MODULM_REPLAYABLE(selective_scan)
