// Computations of latent attention around its cache: the projections of single heads, norm and
// rotation.
#include "base/pool.h"
#include "base/replay.h"
#include "base/vec.h"
#include "norm/norm.h"
#include "rope/rope.h"

namespace modulm {
namespace {

constexpr int kRows = 4;     // tokens that share a load of the weight
constexpr int kVectors = 4;  // vectors of outputs that stay in registers

// [tokens, heads, ...] with strides.
template <class T>
struct Heads {
  T* data;
  int64_t token, head;
  T* at(int64_t t, int64_t h) const { return data + t * token + h * head; }
};

// R tokens of one head, kVectors vectors of outputs. w: [inputs, outputs], from the first column of
// these on.
template <class T, int R>
void block(const T* const (&x)[R], const T* w, int64_t inputs, int64_t outputs, T* const (&out)[R],
           int64_t width) {
  vf total[R][kVectors] = {};
  int lanes[kVectors];
  for (int v = 0; v < kVectors; v++) {
    int64_t left = width - v * kLanes;
    lanes[v] = left < 0 ? 0 : left < kLanes ? int(left) : kLanes;
  }
  for (int64_t k = 0; k < inputs; k++, w += outputs) {
    vf column[kVectors];
    for (int v = 0; v < kVectors; v++)
      column[v] = lanes[v] ? load_n(w + v * kLanes, lanes[v]) : vf{};
    for (int r = 0; r < R; r++) {
      float factor = load_one(x[r] + k);
      for (int v = 0; v < kVectors; v++) total[r][v] += column[v] * factor;
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < kVectors; v++)
      if (lanes[v]) store_n(out[r] + v * kLanes, total[r][v], lanes[v]);
}

template <class T, int R>
void rows_of_head(const Heads<const T>& x, const T* w, const Heads<T>& out, int64_t head,
                  int64_t first, int64_t column, int64_t inputs, int64_t outputs, int64_t width) {
  const T* from[R];
  T* to[R];
  for (int r = 0; r < R; r++) {
    from[r] = x.at(first + r, head);
    to[r] = out.at(first + r, head) + column;
  }
  block<T, R>(from, w + head * inputs * outputs + column, inputs, outputs, to, width);
}

template <class T>
void each_head(const Heads<const T>& x, const T* w, const Heads<T>& out, int64_t tokens,
               int64_t heads, int64_t inputs, int64_t outputs) {
  constexpr int64_t block_width = kVectors * kLanes;
  int64_t blocks = div_up(outputs, block_width);
  parallel(heads * blocks, [&](int64_t task, int) {
    int64_t head = task / blocks, column = task % blocks * block_width;
    int64_t width = outputs - column < block_width ? outputs - column : block_width, t = 0;
    for (; t + kRows <= tokens; t += kRows)
      rows_of_head<T, kRows>(x, w, out, head, t, column, inputs, outputs, width);
    for (; t < tokens; t++)
      rows_of_head<T, 1>(x, w, out, head, t, column, inputs, outputs, width);
  });
}

// Appends the rotated part of every query to its key projection, and writes the key of each token.
template <class T, class W>
void rotated(const Heads<const T>& q, const T* kept, int64_t ldk, const W* weight, float eps,
             const float* table, const int64_t* positions, bool neox, T* queries, T* keys,
             int64_t tokens, int64_t heads, int64_t rank, int64_t turned) {
  int64_t width = rank + turned;
  parallel_runs(tokens, 8192 / (heads * turned + rank) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const float* angles = table + positions[t] * turned;
      auto turn = [&](const T* from, T* to) {
        std::memcpy(to, from, turned * sizeof(T));
        rotate_head(to, angles, turned, neox);
      };
      for (int64_t h = 0; h < heads; h++) turn(q.at(t, h), queries + (t * heads + h) * width + rank);
      rms_row(kept + t * ldk, weight, eps, 0.0f, keys + t * width, rank);
      turn(kept + t * ldk + rank, keys + t * width + rank);
    }
  });
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// out[t, h] = x[t, h] w[h]; x: [tokens, heads, inputs] and out: [tokens, heads, outputs] with
// strides, w: [heads, inputs, outputs] contiguous, all of one dtype; sums in fp32 in order.
MODULM_API void modulm_each_head(const void* x, int64_t x_token, int64_t x_head, const void* w,
                                 void* out, int64_t out_token, int64_t out_head, int64_t tokens,
                                 int64_t heads, int64_t inputs, int64_t outputs, int dtype) {
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    each_head<T>({static_cast<const T*>(x), x_token, x_head}, static_cast<const T*>(w),
                 {static_cast<T*>(out), out_token, out_head}, tokens, heads, inputs, outputs);
  });
}

// q: [tokens, heads, turned] with strides; kept: [tokens, rank + turned] with row stride ldk;
// table: [positions, turned] fp32; queries: [tokens, heads, rank + turned], whose first `rank` are
// left alone; keys: [tokens, rank + turned]; both contiguous.
MODULM_API void modulm_latent_rotated(const void* q, int64_t q_token, int64_t q_head,
                                      const void* kept, int64_t ldk, const void* weight, float eps,
                                      const float* table, const int64_t* positions, int neox,
                                      void* queries, void* keys, int64_t tokens, int64_t heads,
                                      int64_t rank, int64_t turned, int dtype, int weight_dtype) {
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    auto run = [&](auto* scales) {
      rotated<T>({static_cast<const T*>(q), q_token, q_head}, static_cast<const T*>(kept), ldk,
                 scales, eps, table, positions, neox != 0, static_cast<T*>(queries),
                 static_cast<T*>(keys), tokens, heads, rank, turned);
    };
    if (weight_dtype == kF32) run(static_cast<const float*>(weight));
    else run(static_cast<const T*>(weight));
  });
}

MODULM_REPLAYABLE(each_head)
MODULM_REPLAYABLE(latent_rotated)
