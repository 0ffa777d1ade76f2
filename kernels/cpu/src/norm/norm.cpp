// RMSNorm (with and without the residual addition before it) and LayerNorm, a row at a time.
#include <cmath>

#include "base/pool.h"
#include "base/replay.h"
#include "base/vec.h"
#include "norm/norm.h"

namespace modulm {
namespace {

constexpr int64_t kElementsPerTask = 16384;

template <class T, class W>
void rms_rows(const T* x, int64_t stride, T* residual, const W* weight, float eps, float offset,
              T* out, int64_t rows, int64_t size) {
  parallel_runs(rows, kElementsPerTask / size, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const T* row = x + r * stride;
      if (residual) {
        T* kept = residual + r * size;
        for_lanes(size, [&](int64_t i, int n) {
          __builtin_prefetch(row + stride + i);
          __builtin_prefetch(kept + size + i);
          store_n(kept + i, load_n(row + i, n) + load_n(kept + i, n), n);
        });
        row = kept;
      }
      rms_row(row, weight, eps, offset, out + r * size, size);
    }
  });
}

template <class T, class W>
void layer_rows(const T* x, int64_t stride, const W* weight, const W* bias, float eps, T* out,
                int64_t rows, int64_t size) {
  parallel_runs(rows, kElementsPerTask / size, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const T* row = x + r * stride;
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
        vf y = (load_n(row + i, n) - mean) * factor * load_n(weight + i, n);
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

// x: [rows, size] with row stride `stride`; residual (may be null) and out: contiguous.
MODULM_API void modulm_rms_norm(const void* x, int64_t stride, void* residual, const void* weight,
                                float eps, float offset, void* out, int64_t rows, int64_t size,
                                int dtype, int weight_dtype) {
  with_pair(dtype, weight_dtype, [&](auto t, auto w) {
    using T = decltype(t);
    using W = decltype(w);
    rms_rows(static_cast<const T*>(x), stride, static_cast<T*>(residual),
             static_cast<const W*>(weight), eps, offset, static_cast<T*>(out), rows, size);
  });
}

MODULM_API void modulm_layer_norm(const void* x, int64_t stride, const void* weight,
                                  const void* bias, float eps, void* out, int64_t rows,
                                  int64_t size, int dtype, int weight_dtype) {
  with_pair(dtype, weight_dtype, [&](auto t, auto w) {
    using T = decltype(t);
    using W = decltype(w);
    layer_rows(static_cast<const T*>(x), stride, static_cast<const W*>(weight),
               static_cast<const W*>(bias), eps, static_cast<T*>(out), rows, size);
  });
}

MODULM_REPLAYABLE(rms_norm)
MODULM_REPLAYABLE(layer_norm)
