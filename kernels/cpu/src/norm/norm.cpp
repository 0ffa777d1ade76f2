// RMSNorm (with and without the residual addition before it) and LayerNorm, a row at a time.
#include <cmath>

#include "base/pool.h"
#include "base/replay.h"
#include "base/vec.h"
#include "norm/norm.h"

namespace modulm {
namespace {

constexpr int64_t kElementsPerTask = 4096;

// Rows in groups of `count`, such as the heads of tokens.
template <class T>
struct Grouped {
  const T* data;
  int64_t count, group_stride, stride;
  const T* at(int64_t r) const { return data + r / count * group_stride + r % count * stride; }
};

template <class T, class R, class W>
void rms_rows(const Grouped<T>& x, R* residual, const W* weight, float eps, float offset,
              T* out, int64_t rows, int64_t size) {
  parallel_runs(rows, kElementsPerTask / size, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const T* row = x.at(r);
      if (!residual) {
        rms_row(row, weight, eps, offset, out + r * size, size);
        continue;
      }
      R* kept = residual + r * size;
      for_lanes(size, [&](int64_t i, int n) {
        __builtin_prefetch(row + x.group_stride + i);
        __builtin_prefetch(kept + size + i);
        store_n(kept + i, load_n(row + i, n) + load_n(kept + i, n), n);
      });
      rms_row(kept, weight, eps, offset, out + r * size, size);
    }
  });
}

// Row r uses the weight r modulo `weights`; weights are optional.
template <class T, class W>
void layer_rows(const Grouped<T>& x, const W* weights, int64_t count, const W* bias, float eps,
                T* out, int64_t rows, int64_t size) {
  parallel_runs(rows, kElementsPerTask / size, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const T* row = x.at(r);
      const W* weight = weights ? weights + r % count * size : nullptr;
      vf total{};
      for_lanes(size, [&](int64_t i, int n) { total += load_n(row + i, n); });
      float mean = sum(total) / float(size);
      vf squares{};
      for_lanes(size, [&](int64_t i, int n) {
        vf centred = load_n(row + i, n) - mean;
        if (n < kLanes)
          for (int l = n; l < kLanes; l++) centred[l] = 0;
        squares += centred * centred;
      });
      float factor = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
      for_lanes(size, [&](int64_t i, int n) {
        vf y = (load_n(row + i, n) - mean) * factor;
        if (weight) y *= load_n(weight + i, n);
        if (bias) y += load_n(bias + i, n);
        store_n(out + r * size + i, y, n);
      });
    }
  });
}

// Weights are either of the activations' dtype or fp32.
template <class F>
void with_pair(int dtype, int weight_dtype, F&& f) {
  with_float(dtype, [&](auto t) {
    if (weight_dtype == kF32) f(t, float{});
    else f(t, t);
  });
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// x: [rows, size], groups of `count` rows with strides; residual (may be null; of x's dtype or fp32)
// and out: contiguous.
MODULM_API void modulm_rms_norm(const void* x, int64_t count, int64_t group_stride, int64_t stride,
                                void* residual, const void* weight, float eps, float offset,
                                void* out, int64_t rows, int64_t size, int dtype, int weight_dtype,
                                int residual_dtype) {
  with_pair(dtype, weight_dtype, [&](auto t, auto w) {
    using T = decltype(t);
    using W = decltype(w);
    auto run = [&](auto* kept) {
      rms_rows<T>({static_cast<const T*>(x), count, group_stride, stride}, kept, static_cast<const W*>(weight), eps, offset,
               static_cast<T*>(out), rows, size);
    };
    if (residual_dtype == kF32) run(static_cast<float*>(residual));
    else run(static_cast<T*>(residual));
  });
}

// x, out: as above. weights: [weight_count, size] or null; bias: [size] or null.
MODULM_API void modulm_layer_norm(const void* x, int64_t count, int64_t group_stride,
                                  int64_t stride, const void* weights, int64_t weight_count,
                                  const void* bias, float eps, void* out, int64_t rows,
                                  int64_t size, int dtype, int weight_dtype) {
  with_pair(dtype, weight_dtype, [&](auto t, auto w) {
    using T = decltype(t);
    using W = decltype(w);
    layer_rows<T>({static_cast<const T*>(x), count, group_stride, stride},
                  static_cast<const W*>(weights), weight_count, static_cast<const W*>(bias), eps,
                  static_cast<T*>(out), rows, size);
  });
}

MODULM_REPLAYABLE(rms_norm)
MODULM_REPLAYABLE(layer_norm)
