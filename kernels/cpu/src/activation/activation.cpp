// act(x), act(gate) * up over rows that hold the gate in their first and up in their second half,
// and x * act(y).
#include "base/math.h"
#include "base/pool.h"
#include "base/replay.h"

namespace modulm {
namespace {

constexpr int64_t kElementsPerTask = 8192;
constexpr int64_t kAhead = 1024;  // elements; the hardware prefetcher stops at 4 KB pages

enum Kind : int {
  kSilu, kGelu, kGeluTanh, kQuickGelu, kRelu, kReluSquared, kSigmoid, kTanh, kXielu, kIdentity
};

// xIELU (Huang and Schlag, arXiv 2411.13010): a parabola above zero, a (e^x - 1 - x) below, and x /
// 2 everywhere. Near zero, e^x - 1 - x is computed by its series: the difference would cancel.
inline vf xielu(vf x, float above, float below) {
  vf low = choose(x < 0.0f, x, vf{});
  vf series = low * (1.0f / 5040) + (1.0f / 720);
  series = series * low + (1.0f / 120);
  series = series * low + (1.0f / 24);
  series = series * low + (1.0f / 6);
  series = (series * low + 0.5f) * low * low;
  vf bent = choose(low > -0.3f, series, vexp(low) - 1.0f - low);
  return choose(x > 0.0f, x * x * above, bent * below) + x * 0.5f;
}

// Calls f with the function of this kind; xielu has two constants.
template <class F>
void with_activation(int kind, float first, float second, F&& f) {
  switch (kind) {
    case kSilu: return f([](vf v) { return silu(v); });
    case kGelu: return f([](vf v) { return gelu_erf(v); });
    case kGeluTanh: return f([](vf v) { return gelu_tanh(v); });
    case kQuickGelu: return f([](vf v) { return v / (vexp(v * -1.702f) + 1.0f); });
    case kRelu: return f([](vf v) { return choose(v < 0.0f, vf{}, v); });
    case kReluSquared: return f([](vf v) { return choose(v < 0.0f, vf{}, v * v); });
    case kSigmoid: return f([](vf v) { return sigmoid(v); });
    case kTanh: return f([](vf v) { return vtanh(v); });
    case kXielu: return f([=](vf v) { return xielu(v, first, second); });
    default: return f([](vf v) { return v; });
  }
}

template <class T, class Act>
void plain(const T* x, int64_t stride, T* out, int64_t rows, int64_t size, Act act) {
  parallel_runs(rows, kElementsPerTask / size + 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      for_lanes(size, [&](int64_t i, int n) {
        store_n(out + r * size + i, act(load_n(x + r * stride + i, n)), n);
      });
  });
}

template <class X, class T, class Act>
void product(const X* x, int64_t ldx, const T* y, int64_t ldy, T* out, int64_t rows, int64_t size,
             Act act) {
  parallel_runs(rows, kElementsPerTask / size + 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      for_lanes(size, [&](int64_t i, int n) {
        vf factor = act(load_n(y + r * ldy + i, n));
        store_n(out + r * size + i, load_n(x + r * ldx + i, n) * factor, n);
      });
  });
}

template <class T, class Act>
void gated(const T* x, int64_t stride, T* out, int64_t rows, int64_t size, Act act) {
  // Long rows are split as well: one row of a large MLP is work for all threads.
  int64_t cut = size < kElementsPerTask ? size : kElementsPerTask;
  int64_t cuts = div_up(size, cut);
  parallel_runs(rows * cuts, kElementsPerTask / cut, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; task++) {
      int64_t row = task / cuts, first = task % cuts * cut;
      const T* gate = x + row * stride + first;
      T* to = out + row * size + first;
      for_lanes(size - first < cut ? size - first : cut, [&](int64_t i, int n) {
        __builtin_prefetch(gate + i + kAhead);
        __builtin_prefetch(gate + size + i + kAhead);
        store_n(to + i, act(load_n(gate + i, n)) * load_n(gate + size + i, n), n);
      });
    }
  });
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// x: [rows, 2 size], out: [rows, size] contiguous.
MODULM_API void modulm_gated(const void* x, int64_t stride, void* out, int64_t rows, int64_t size,
                             int kind, int dtype) {
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    with_activation(kind, 0, 0, [&](auto act) {
      gated(static_cast<const T*>(x), stride, static_cast<T*>(out), rows, size, act);
    });
  });
}

MODULM_REPLAYABLE(gated)

// x: [rows, size] with a row stride, out: contiguous.
MODULM_API void modulm_activate(const void* x, int64_t stride, void* out, int64_t rows,
                                int64_t size, int kind, float first, float second, int dtype) {
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    with_activation(kind, first, second, [&](auto act) {
      plain(static_cast<const T*>(x), stride, static_cast<T*>(out), rows, size, act);
    });
  });
}

MODULM_REPLAYABLE(activate)

// out = x * act(y) in y's dtype; x is of that dtype too, or fp32. x, y: row strides.
MODULM_API void modulm_multiply(const void* x, int64_t ldx, int x_dtype, const void* y,
                                int64_t ldy, void* out, int64_t rows, int64_t size, int kind,
                                int dtype) {
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    with_activation(kind, 0, 0, [&](auto act) {
      auto run = [&](auto* from) {
        product(from, ldx, static_cast<const T*>(y), ldy, static_cast<T*>(out), rows, size, act);
      };
      if (x_dtype == kF32) run(static_cast<const float*>(x));
      else run(static_cast<const T*>(x));
    });
  });
}

MODULM_REPLAYABLE(multiply)
