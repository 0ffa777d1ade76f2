// Selective scan (Mamba 1 and 2): state = exp(dt a) state + dt x b, y = c state, token by token.
//
// The numbers of a state do not see each other, only y sums over them. So a few rows of a head's
// state stay in registers while a run of tokens passes, and every token is computed alike, whether
// it comes alone or in a prompt: results do not depend on how steps cut a sequence.
#include <type_traits>

#include "base/math.h"
#include "base/pool.h"
#include "base/types.h"
#include "base/vec.h"
#include "recurrence/rows.h"

namespace modulm {
namespace {

constexpr int64_t kTile = 32;             // tokens whose b and c stay in the first-level cache
constexpr int64_t kNumbersPerTask = 16384;
constexpr int kMostVectors = 8;

struct Scan {
  const float *x, *dt, *a;
  int64_t paces;  // decays per head: 1 or size
  const float *b, *c;
  float *states, *y;
  int64_t heads, dim, size, groups;
  StateRows rows;
};

// One tile of one group's b or c: rows of `stride` floats.
struct Tile {
  const float *b, *c;
  int64_t stride;
};

// R rows of V vectors of a head's state, from its number `first` on, over a tile's tokens.
// decays: [tokens], or where a head has a decay per number [tokens, V * kLanes].
template <int V, int R>
void pass(const Scan& s, float* state, const float* x, const float* dt, const float* decays,
          bool paced, const Tile& tile, float* y, int64_t tokens, int lanes, bool add) {
  vf held[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++)
      held[r][v] = load_n(state + r * s.size + v * kLanes, v == V - 1 ? lanes : kLanes);
  for (int64_t t = 0; t < tokens; t++) {
    const float* b = tile.b + t * tile.stride;
    const float* c = tile.c + t * tile.stride;
    const float* token = x + t * s.heads * s.dim;
    float* out = y + t * s.heads * s.dim;
    for (int r = 0; r < R; r++) {
      vf drive = splat(token[r] * dt[t * s.heads]);
      vf total{};
      for (int v = 0; v < V; v++) {
        vf fade = paced ? load(decays + (t * V + v) * kLanes) : splat(decays[t]);
        held[r][v] = held[r][v] * fade + drive * load(b + v * kLanes);
        total += held[r][v] * load(c + v * kLanes);
      }
      float found = sum(total);
      out[r] = add ? out[r] + found : found;
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++)
      store_n(state + r * s.size + v * kLanes, held[r][v], v == V - 1 ? lanes : kLanes);
}

template <int V>
void block(const Scan& s, float* state, const float* x, const float* dt, const float* decays,
           bool paced, const Tile& tile, float* y, int64_t tokens, int lanes, bool add) {
  constexpr int R = V > 4 ? 2 : 4;
  int64_t row = 0;
  for (; row + R <= s.dim; row += R)
    pass<V, R>(s, state + row * s.size, x + row, dt, decays, paced, tile, y + row, tokens, lanes,
               add);
  for (; row < s.dim; row++)
    pass<V, 1>(s, state + row * s.size, x + row, dt, decays, paced, tile, y + row, tokens, lanes,
               add);
}

// exp(dt a) for a tile's tokens, laid out as `pass` reads it.
void fill_decays(const Scan& s, const float* a, const float* dt, int64_t tokens, int64_t first,
                 int vectors, int lanes, float* decays) {
  if (s.paces == 1) {
    for_lanes(tokens, [&](int64_t t, int n) {
      vf steps{};
      for (int i = 0; i < n; i++) steps[i] = dt[(t + i) * s.heads];
      store(decays + t, vexp(steps * a[0]));
    });
    return;
  }
  for (int64_t t = 0; t < tokens; t++)
    for (int v = 0; v < vectors; v++) {
      vf pace = load_n(a + first + v * kLanes, v == vectors - 1 ? lanes : kLanes);
      store(decays + (t * vectors + v) * kLanes, vexp(pace * dt[t * s.heads]));
    }
}

// A head over the tokens [at, at + tokens) of the step; `tile` holds its group's b and c.
void head_tile(const Scan& s, int64_t head, int64_t at, int64_t tokens, float* state,
               const Tile& tile, float* decays) {
  const float* x = s.x + (at * s.heads + head) * s.dim;
  const float* dt = s.dt + at * s.heads + head;
  const float* a = s.a + head * s.paces;
  float* y = s.y + (at * s.heads + head) * s.dim;
  for (int64_t first = 0; first < s.size; first += kMostVectors * kLanes) {
    int64_t left = s.size - first;
    int vectors = left >= kMostVectors * kLanes ? kMostVectors : int((left + kLanes - 1) / kLanes);
    int lanes = left >= vectors * kLanes ? kLanes : int(left - (vectors - 1) * kLanes);
    if (first == 0 || s.paces > 1) fill_decays(s, a, dt, tokens, first, vectors, lanes, decays);
    Tile part{tile.b + first, tile.c + first, tile.stride};
    auto run = [&](auto count) {
      block<decltype(count)::value>(s, state + first, x, dt, decays, s.paces > 1, part, y, tokens,
                                    lanes, first > 0);
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

// A copy of one group's b or c with rows that end in zeros, where they are no whole vectors.
void copy_rows(const float* from, int64_t stride, int64_t size, int64_t tokens, float* to,
               int64_t padded) {
  for (int64_t t = 0; t < tokens; t++) {
    std::memcpy(to + t * padded, from + t * stride, size * sizeof(float));
    std::memset(to + t * padded + size, 0, (padded - size) * sizeof(float));
  }
}

// Heads [begin, end) of one group, for one row.
void scan_heads(const Scan& s, int64_t row, int64_t begin, int64_t end) {
  int64_t each = s.dim * s.size, numbers = s.heads * each, group = begin / (s.heads / s.groups);
  int64_t padded = (s.size + kLanes - 1) / kLanes * kLanes, stride = s.groups * s.size;
  float* room = static_cast<float*>(scratch(0, (2 * kTile + kTile + 1) * padded * 4 + 256));
  float* decays = room + 2 * kTile * padded;
  const float* from = s.states + s.rows.sources[row] * numbers;
  s.rows.stretches(row, [&](int64_t first, int64_t last, int64_t slot) {
    float* state = s.states + slot * numbers;
    size_t bytes = (end - begin) * each * sizeof(float);
    if (first == 0 && s.rows.fresh[row]) std::memset(state + begin * each, 0, bytes);
    else if (from != state) std::memcpy(state + begin * each, from + begin * each, bytes);
    from = state;
    for (int64_t t = first; t < last; t += kTile) {
      int64_t tokens = last - t < kTile ? last - t : kTile, at = s.rows.starts[row] + t;
      Tile tile{s.b + at * stride + group * s.size, s.c + at * stride + group * s.size, stride};
      if (padded != s.size) {
        copy_rows(tile.b, stride, s.size, tokens, room, padded);
        copy_rows(tile.c, stride, s.size, tokens, room + kTile * padded, padded);
        tile = {room, room + kTile * padded, padded};
      }
      for (int64_t head = begin; head < end; head++)
        head_tile(s, head, at, tokens, state + head * each, tile, decays);
    }
  });
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// x, y: [tokens, heads, dim]; dt: [tokens, heads]; a: [heads, paces]; b, c: [tokens, groups, size];
// states: [slots, heads, dim, size]; kept: [kept_count, 3], by row and then by tokens. All fp32.
MODULM_API void modulm_selective_scan(const float* x, const float* dt, const float* a,
                                      int64_t paces, const float* b, const float* c, float* states,
                                      float* y, const int32_t* starts, const int64_t* sources,
                                      const int64_t* slots, const uint8_t* fresh,
                                      const int64_t* kept, int64_t kept_count, int64_t rows,
                                      int64_t heads, int64_t dim, int64_t size, int64_t groups) {
  Scan s{x,    dt,    a,   paces, b,    c,
         states, y, heads, dim, size, groups,
         {starts, sources, slots, fresh, reinterpret_cast<const Kept*>(kept), kept_count}};
  int64_t per_group = heads / groups, grain = kNumbersPerTask / (dim * size);
  grain = grain < 1 ? 1 : grain > per_group ? per_group : grain;
  int64_t parts = (per_group + grain - 1) / grain;
  parallel(rows * groups * parts, [&](int64_t task, int) {
    int64_t row = task / (groups * parts), group = task / parts % groups;
    int64_t begin = group * per_group + task % parts * grain, limit = (group + 1) * per_group;
    scan_heads(s, row, begin, begin + grain < limit ? begin + grain : limit);
  });
}
