// Elementwise operations on rows that some models need between kernels: sums, multiples, bounds and
// conversions.
#include "base/math.h"
#include "base/pool.h"
#include "base/replay.h"

namespace modulm {
namespace {

constexpr int64_t kElementsPerTask = 8192;

// out = f(x), a vector at a time; x: row stride ldx, out: [rows, size] contiguous.
template <class T, class O, class F>
void map_rows(const void* x, int64_t ldx, void* out, int64_t rows, int64_t size, F f) {
  parallel_runs(rows, kElementsPerTask / size + 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const T* from = static_cast<const T*>(x) + r * ldx;
      O* to = static_cast<O*>(out) + r * size;
      for_lanes(size, [&](int64_t i, int n) { store_n(to + i, f(load_n(from + i, n)), n); });
    }
  });
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// out = x + y, or with a gate per row x + sigmoid(gate) * y. x, y: row strides ldx, ldy; gate: row
// stride ldg, or null; out: [rows, size] contiguous.
MODULM_API void modulm_add(const void* x, int64_t ldx, const void* y, int64_t ldy, const void* gate,
                           int64_t ldg, void* out, int64_t rows, int64_t size, int dtype) {
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    parallel_runs(rows, kElementsPerTask / size + 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) {
        const T *a = static_cast<const T*>(x) + r * ldx, *b = static_cast<const T*>(y) + r * ldy;
        T* to = static_cast<T*>(out) + r * size;
        vf factor = splat(1.0f);
        if (gate) factor /= vexp(splat(-load_one(static_cast<const T*>(gate) + r * ldg))) + 1.0f;
        for_lanes(size, [&](int64_t i, int n) {
          store_n(to + i, load_n(a + i, n) + load_n(b + i, n) * factor, n);
        });
      }
    });
  });
}

MODULM_REPLAYABLE(add)

// The following functions take x with row stride ldx and write out: [rows, size], contiguous.

// out = x * factor
MODULM_API void modulm_scale(const void* x, int64_t ldx, float factor, void* out, int64_t rows,
                             int64_t size, int dtype) {
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    map_rows<T, T>(x, ldx, out, rows, size, [=](vf v) { return v * factor; });
  });
}

MODULM_REPLAYABLE(scale)

// out = x, but within [-limit, limit]
MODULM_API void modulm_clamp(const void* x, int64_t ldx, float limit, void* out, int64_t rows,
                             int64_t size, int dtype) {
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    map_rows<T, T>(x, ldx, out, rows, size, [=](vf v) {
      v = choose(v > limit, splat(limit), v);
      return choose(v < -limit, splat(-limit), v);
    });
  });
}

MODULM_REPLAYABLE(clamp)

// out[r, j] = x[r, order[j]]; order: [size], indices in a row of x
MODULM_API void modulm_take_columns(const void* x, int64_t ldx, const int64_t* order, void* out,
                                    int64_t rows, int64_t size, int dtype) {
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    parallel_runs(rows, kElementsPerTask / size + 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) {
        const T* from = static_cast<const T*>(x) + r * ldx;
        T* to = static_cast<T*>(out) + r * size;
        for (int64_t j = 0; j < size; j++) to[j] = from[order[j]];
      }
    });
  });
}

MODULM_REPLAYABLE(take_columns)

// out = x in another dtype
MODULM_API void modulm_cast(const void* x, int64_t ldx, void* out, int64_t rows, int64_t size,
                            int dtype, int out_dtype) {
  with_float(dtype, [&](auto t) {
    with_float(out_dtype, [&](auto o) {
      map_rows<decltype(t), decltype(o)>(x, ldx, out, rows, size, [](vf v) { return v; });
    });
  });
}

MODULM_REPLAYABLE(cast)
