// The gated delta rule (Yang et al., arXiv 2412.06464), token by token.
//
// The state of a head is a matrix from keys to values whose columns are independent: a task
// computes some columns of one head for all tokens of a row, in a copy that stays in the
// first-level cache. A token gets the same result alone and in a prompt.
#include <cmath>

#include "base/math.h"
#include "base/pool.h"
#include "base/replay.h"
#include "base/types.h"
#include "base/vec.h"
#include "recurrence/rows.h"

namespace modulm {
namespace {

constexpr int kMostVectors = 4;

template <class T>
struct Delta {
  Rows<T> q, k, v, beta, step;
  const float *a_log, *bias;
  float reach;
  float *states, *y;
  int64_t key_heads, heads, key_dim, value_dim;
  StateRows rows;
};

// x / |x| * scale, in fp32.
template <class T>
void unit(const T* x, int64_t size, float scale, float* out) {
  vf squares{};
  for_lanes(size, [&](int64_t i, int n) {
    vf v = load_n(x + i, n);
    squares += v * v;
  });
  float factor = scale / std::sqrt(sum(squares) + 1e-6f);
  for_lanes(size, [&](int64_t i, int n) { store_n(out + i, load_n(x + i, n) * factor, n); });
}

// W vectors of columns that begin at `column`; the last has `lanes` of them. One token.
// state: [key_dim, W * kLanes]; room: [2, key_dim].
template <int W, class T>
void token(const Delta<T>& d, int64_t t, int64_t head, int64_t column, int lanes, float* state,
           float* room) {
  int64_t key_head = head / (d.heads / d.key_heads);
  float *q = room, *k = room + d.key_dim;
  unit(d.q.at(t) + key_head * d.key_dim, d.key_dim, 1.0f / std::sqrt(float(d.key_dim)), q);
  unit(d.k.at(t) + key_head * d.key_dim, d.key_dim, 1.0f, k);
  const T* v = d.v.at(t) + head * d.value_dim + column;
  float* y = d.y + (t * d.heads + head) * d.value_dim + column;
  vf step = softplus(splat(load_one(d.step.at(t) + head) + d.bias[head]));
  vf fade = vexp(-vexp(splat(d.a_log[head])) * step);
  vf beta = sigmoid(splat(load_one(d.beta.at(t) + head))) * d.reach;
  // Two running sums each, so that additions do not wait for each other.
  vf seen[2][W] = {};
  for (int64_t i = 0; i < d.key_dim; i++)
    for (int w = 0; w < W; w++) seen[i & 1][w] += load(state + (i * W + w) * kLanes) * k[i];
  vf change[W];
  for (int w = 0; w < W; w++) {
    vf value = load_n(v + w * kLanes, w == W - 1 ? lanes : kLanes);
    change[w] = (value - (seen[0][w] + seen[1][w]) * fade) * beta;
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
    store_n(y + w * kLanes, out[0][w] + out[1][w], w == W - 1 ? lanes : kLanes);
}

template <int W, class T>
void columns(const Delta<T>& d, int64_t row, int64_t head, int64_t column, int lanes) {
  constexpr int64_t width = W * kLanes;
  int64_t count = (W - 1) * kLanes + lanes, matrix = d.key_dim * d.value_dim;
  auto* state = static_cast<float*>(scratch(0, d.key_dim * (width + 2) * sizeof(float)));
  auto place = [&](int64_t slot) {
    return d.states + (slot * d.heads + head) * matrix + column;
  };
  std::memset(state, 0, d.key_dim * width * sizeof(float));
  if (!d.rows.fresh[row])
    for (int64_t i = 0; i < d.key_dim; i++)
      std::memcpy(state + i * width, place(d.rows.sources[row]) + i * d.value_dim, count * 4);
  d.rows.stretches(row, [&](int64_t begin, int64_t end, int64_t slot) {
    for (int64_t t = begin; t < end; t++)
      token<W>(d, d.rows.starts[row] + t, head, column, lanes, state, state + d.key_dim * width);
    for (int64_t i = 0; i < d.key_dim; i++)
      std::memcpy(place(slot) + i * d.value_dim, state + i * width, count * 4);
  });
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// q, k: [tokens, key_heads, key_dim]; v: [tokens, heads, value_dim]; beta, step: [tokens, heads], all
// of one dtype and with row strides. a_log, bias: [heads]; y: [tokens, heads, value_dim]; states:
// [slots, heads, key_dim, value_dim]; kept as for the scan: fp32.
MODULM_API void modulm_delta_rule(
    const void* q, int64_t ldq, const void* k, int64_t ldk, const void* v, int64_t ldv,
    const void* beta, int64_t ldb, const void* step, int64_t lds, const float* a_log,
    const float* bias, float reach, float* states, float* y, const int32_t* starts, const int64_t* sources,
    const int64_t* slots, const uint8_t* fresh, const int64_t* kept, int64_t kept_count,
    int64_t rows, int64_t key_heads, int64_t heads, int64_t key_dim, int64_t value_dim,
    int dtype) {
  constexpr int64_t width = kMostVectors * kLanes;
  int64_t parts = (value_dim + width - 1) / width;
  with_float(dtype, [&](auto type) {
    using T = decltype(type);
    auto as = [](const void* data, int64_t stride) {
      return Rows<T>{static_cast<const T*>(data), stride};
    };
    Delta<T> d{as(q, ldq), as(k, ldk), as(v, ldv), as(beta, ldb), as(step, lds), a_log, bias, reach,
               states, y, key_heads, heads, key_dim, value_dim,
               {starts, sources, slots, fresh, reinterpret_cast<const Kept*>(kept), kept_count}};
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
  });
}

MODULM_REPLAYABLE(delta_rule)
