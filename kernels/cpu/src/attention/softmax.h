// The softmax of one row over a chunk of scores in the first-level cache.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/fixed.h"
#include "attention/state.h"

namespace modulm {

constexpr int kChunk = 128;  // scores of a row that become weights together
constexpr int kTwo = 2 * kLanes;  // columns that row_weights takes at a time

// Columns [first, last) of a chunk.
struct Columns {
  int64_t first, last;
  bool none() const { return first >= last; }
  // Whether some of the `lanes` columns from `column` on are outside.
  bool cut(int64_t column, int lanes) const { return column < first || column + lanes > last; }
};

// Two vectors one after the other.
template <class T>
inline void store_two(T* p, vf a, vf b) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same<T, bf16>::value)
    return store_raw(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#endif
  store(p, a);
  store(p + kLanes, b);
}

// Whether some lane is above the limit, or NaN.
inline bool any_beyond(vf x, float limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, (__m512)splat(limit), _CMP_NLE_UQ) != 0;
#else
  vi within = x <= limit;
  for (int i = 0; i < kLanes; i++)
    if (!within[i]) return true;
  return false;
#endif
}

inline vi lanes_from(int64_t column) {
  vi lane;
  for (int i = 0; i < kLanes; i++) lane[i] = i;
  return lane + int32_t(column);
}
inline vf within(int64_t column, Columns seen, vf yes, vf no) {
  vi at = lanes_from(column);
  return choose((at >= int32_t(seen.first)) & (at < int32_t(seen.last)), yes, no);
}

inline float row_peak(const float* x, Columns seen) {
  vf most = splat(kNever);
  for (int64_t i = seen.first / kLanes * kLanes; i < seen.last; i += kLanes) {
    vf each = load(x + i);
    if (seen.cut(i, kLanes)) each = within(i, seen, each, splat(kNever));
    most = vmax(each, most);
  }
  return largest(most);
}

inline int64_t weights_begin(Columns seen) { return seen.first / kTwo * kTwo; }
inline int64_t weights_end(Columns seen) { return div_up(seen.last, kTwo) * kTwo; }

// weights = 2^(x unit - peak), with 0 for other columns up to a multiple of kTwo; returns their sum
// per lane. `Whole`: all columns of the chunk are visible.
template <class Math, bool Whole>
inline vf row_weights(const float* x, Columns seen, float unit, float peak,
                      typename Math::Weight* to) {
  vf even{}, odd{};
  auto step = [&](int64_t i) {
    vf a = vexp2<Math::coarse>(load(x + i) * unit - peak);
    vf b = vexp2<Math::coarse>(load(x + i + kLanes) * unit - peak);
    if (!Whole && seen.cut(i, kTwo)) {
      a = within(i, seen, a, vf{});
      b = within(i + kLanes, seen, b, vf{});
    }
    even += a;
    odd += b;
    store_two(to + i, a, b);
  };
  if constexpr (Whole) {
#pragma GCC unroll 8
    for (int i = 0; i < kChunk; i += kTwo) step(i);
  } else {
    for (int64_t i = weights_begin(seen); i < seen.last; i += kTwo) step(i);
  }
  return even + odd;
}

// The same in fixed point, from scores in units of log2, with planes `stride` apart. Stored weights
// are multiplied by `shares`, which are 0 for other columns.
template <bool Whole>
inline vf row_planes(const float* x, Columns seen, float peak, const float* shares, FixedWeight* to,
                     int64_t stride) {
  vf even{}, odd{};
  auto step = [&](int64_t i) {
    vf a = vexp2<true>(load(x + i) - peak), b = vexp2<true>(load(x + i + kLanes) - peak);
    if (!Whole && seen.cut(i, kTwo)) {
      a = within(i, seen, a, vf{});
      b = within(i + kLanes, seen, b, vf{});
    }
    even += a;
    odd += b;
    split_weights(a, b, load(shares + i), load(shares + i + kLanes), to + i, stride);
  };
  if constexpr (Whole) {
#pragma GCC unroll 8
    for (int i = 0; i < kChunk; i += kTwo) step(i);
  } else {
    for (int64_t i = weights_begin(seen); i < seen.last; i += kTwo) step(i);
  }
  return even + odd;
}

}  // namespace modulm
