// RMSNorm of the output of a recurrence, together with its gate, in fp32.
#include <cmath>

#include "base/math.h"
#include "base/pool.h"
#include "base/replay.h"

namespace modulm {
namespace {

constexpr int64_t kElementsPerTask = 8192;

// One group of one row. first: the norm comes before the gate.
template <class T, class W>
void group_norm(const float* x, const T* gate, const W* weight, float eps, bool first, T* out,
                float* room, int64_t size) {
  vf squares{};
  for_lanes(size, [&](int64_t i, int n) {
    vf v = load_n(x + i, n);
    if (!first) v *= silu(load_n(gate + i, n));
    store_n(room + i, v, n);
    squares += v * v;
  });
  float factor = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
  for_lanes(size, [&](int64_t i, int n) {
    vf y = load_n(room + i, n) * factor * load_n(weight + i, n);
    if (first) y *= silu(load_n(gate + i, n));
    store_n(out + i, y, n);
  });
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// x: [rows, groups * size] fp32; gate: the same with row stride ldg; weight: [weights, size], one
// for all groups or one for each; out: contiguous, of the gate's dtype.
MODULM_API void modulm_gated_rms_norm(const float* x, const void* gate, int64_t ldg,
                                      const void* weight, int64_t weights, float eps, int first,
                                      void* out, int64_t rows, int64_t groups, int64_t size,
                                      int dtype, int weight_dtype) {
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    auto run = [&](auto* scales) {
      parallel_runs(rows * groups, kElementsPerTask / size + 1, [&](int64_t begin, int64_t end) {
        auto* room = static_cast<float*>(scratch(0, size * sizeof(float)));
        for (int64_t at = begin; at < end; at++)
          group_norm(x + at * size, static_cast<const T*>(gate) + at / groups * ldg + at % groups * size,
                     scales + at % weights * size, eps, first != 0, static_cast<T*>(out) + at * size,
                     room, size);
      });
    };
    if (weight_dtype == kF32) run(static_cast<const float*>(weight));
    else run(static_cast<const T*>(weight));
  });
}

MODULM_REPLAYABLE(gated_rms_norm)
