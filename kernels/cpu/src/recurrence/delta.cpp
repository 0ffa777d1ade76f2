// The gated delta rule (Yang et al., arXiv 2412.06464), token by token.
//
// A head's state is a matrix from keys to values whose columns do not see each other: a task takes
// some columns of one head through all tokens of a row, out of a copy that stays in the first-level
// cache. Every token is computed alike, whether it comes alone or in a prompt.
#include "base/math.h"
#include "base/pool.h"
#include "base/types.h"
#include "base/vec.h"
#include "recurrence/rows.h"

namespace modulm {
namespace {

constexpr int kMostVectors = 4;

struct Delta {
  const float *q, *k, *v, *beta, *decay;
  float *states, *y;
  int64_t key_heads, heads, key_dim, value_dim;
  StateRows rows;
};

// W vectors of columns that begin at `column`; the last has `lanes` of them. One token.
// state: [key_dim, W * kLanes].
template <int W>
void token(const Delta& d, int64_t t, int64_t head, int64_t column, int lanes, float* state) {
  int64_t place = t * d.heads + head, key_head = head / (d.heads / d.key_heads);
  const float* k = d.k + (t * d.key_heads + key_head) * d.key_dim;
  const float* q = d.q + (t * d.key_heads + key_head) * d.key_dim;
  const float* v = d.v + place * d.value_dim + column;
  vf fade = vexp(splat(d.decay[place]));
  // Two running sums each, so that additions do not wait for each other.
  vf seen[2][W] = {};
  for (int64_t i = 0; i < d.key_dim; i++)
    for (int w = 0; w < W; w++) seen[i & 1][w] += load(state + (i * W + w) * kLanes) * k[i];
  vf change[W];
  for (int w = 0; w < W; w++) {
    vf value = load_n(v + w * kLanes, w == W - 1 ? lanes : kLanes);
    change[w] = (value - (seen[0][w] + seen[1][w]) * fade) * d.beta[place];
  }
  vf out[2][W] = {};
  for (int64_t i = 0; i < d.key_dim; i++)
    for (int w = 0; w < W; w++) {
      float* at = state + (i * W + w) * kLanes;
      vf moved = load(at) * fade + change[w] * k[i];
      store(at, moved);
      out[i & 1][w] += moved * q[i];
    }
  for (int w = 0; w < W; w++)
    store_n(d.y + place * d.value_dim + column + w * kLanes, out[0][w] + out[1][w],
            w == W - 1 ? lanes : kLanes);
}

template <int W>
void columns(const Delta& d, int64_t row, int64_t head, int64_t column, int lanes) {
  constexpr int64_t width = W * kLanes;
  int64_t count = (W - 1) * kLanes + lanes, matrix = d.key_dim * d.value_dim;
  auto* state = static_cast<float*>(scratch(0, d.key_dim * width * sizeof(float)));
  auto place = [&](int64_t slot) {
    return d.states + (slot * d.heads + head) * matrix + column;
  };
  std::memset(state, 0, d.key_dim * width * sizeof(float));
  if (!d.rows.fresh[row])
    for (int64_t i = 0; i < d.key_dim; i++)
      std::memcpy(state + i * width, place(d.rows.sources[row]) + i * d.value_dim, count * 4);
  d.rows.stretches(row, [&](int64_t begin, int64_t end, int64_t slot) {
    for (int64_t t = begin; t < end; t++)
      token<W>(d, d.rows.starts[row] + t, head, column, lanes, state);
    for (int64_t i = 0; i < d.key_dim; i++)
      std::memcpy(place(slot) + i * d.value_dim, state + i * width, count * 4);
  });
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// q, k: [tokens, key_heads, key_dim]; v, y: [tokens, heads, value_dim]; beta, decay: [tokens,
// heads]; states: [slots, heads, key_dim, value_dim]; kept as for the scan. All fp32.
MODULM_API void modulm_delta_rule(const float* q, const float* k, const float* v,
                                  const float* beta, const float* decay, float* states, float* y,
                                  const int32_t* starts, const int64_t* sources,
                                  const int64_t* slots, const uint8_t* fresh, const int64_t* kept,
                                  int64_t kept_count, int64_t rows, int64_t key_heads,
                                  int64_t heads, int64_t key_dim, int64_t value_dim) {
  Delta d{q, k, v, beta, decay, states, y, key_heads, heads, key_dim, value_dim,
          {starts, sources, slots, fresh, reinterpret_cast<const Kept*>(kept), kept_count}};
  constexpr int64_t width = kMostVectors * kLanes;
  int64_t parts = (value_dim + width - 1) / width;
  parallel(rows * heads * parts, [&](int64_t task, int) {
    int64_t row = task / (heads * parts), head = task / parts % heads;
    int64_t column = task % parts * width, left = value_dim - column;
    int vectors = left >= width ? kMostVectors : int((left + kLanes - 1) / kLanes);
    int lanes = left >= vectors * kLanes ? kLanes : int(left - (vectors - 1) * kLanes);
    switch (vectors) {
      case 1: columns<1>(d, row, head, column, lanes); break;
      case 2: columns<2>(d, row, head, column, lanes); break;
      case 3: columns<3>(d, row, head, column, lanes); break;
      default: columns<4>(d, row, head, column, lanes);
    }
  });
}
