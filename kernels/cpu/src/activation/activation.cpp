// act(gate) * up over rows that hold the gate in their first and up in their second half.
#include "base/math.h"
#include "base/pool.h"
#include "base/replay.h"

namespace modulm {
namespace {

constexpr int64_t kElementsPerTask = 8192;

template <class T, class Act>
void gated(const T* x, int64_t stride, T* out, int64_t rows, int64_t size, Act act) {
  // Long rows are cut as well: one row of a large MLP is work for all threads.
  int64_t cut = size < kElementsPerTask ? size : kElementsPerTask;
  int64_t cuts = div_up(size, cut);
  parallel_runs(rows * cuts, kElementsPerTask / cut, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      int64_t row = task / cuts, first = task % cuts * cut;
      const T* gate = x + row * stride + first;
      T* to = out + row * size + first;
      for_lanes(size - first < cut ? size - first : cut, [&](int64_t i, int n) {
        store_n(to + i, act(load_n(gate + i, n)) * load_n(gate + size + i, n), n);
      });
    }
  });
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// kind: 0 silu, 1 gelu by erf, 2 gelu by tanh. x: [rows, 2 size], out: [rows, size] contiguous.
MODULM_API void modulm_gated(const void* x, int64_t stride, void* out, int64_t rows, int64_t size,
                             int kind, int dtype) {
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    auto from = static_cast<const T*>(x);
    auto to = static_cast<T*>(out);
    if (kind == 0) gated(from, stride, to, rows, size, [](vf v) { return silu(v); });
    else if (kind == 1) gated(from, stride, to, rows, size, [](vf v) { return gelu_erf(v); });
    else gated(from, stride, to, rows, size, [](vf v) { return gelu_tanh(v); });
  });
}

MODULM_REPLAYABLE(gated)
