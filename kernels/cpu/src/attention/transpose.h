// Transposition of fp32 matrices whose sides are multiples of the vector's lanes.
#pragma once

#include "base/vec.h"

namespace modulm {

// Exchanges bit `half` of the row index with that of the lane index, for all rows.
template <int Half>
inline void exchange(vf (&x)[kLanes]) {
  vi low, high;
  for (int i = 0; i < kLanes; i++) {
    low[i] = i & Half ? i - Half + kLanes : i;
    high[i] = i & Half ? i + kLanes : i + Half;
  }
  for (int i = 0; i < kLanes; i++) {
    if (i & Half) continue;
    vf a = x[i], b = x[i + Half];
    x[i] = __builtin_shuffle(a, b, low);
    x[i + Half] = __builtin_shuffle(a, b, high);
  }
  if constexpr (Half > 1) exchange<Half / 2>(x);
}

// to[column][row] = from[row][column]; strides in elements.
inline void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns,
                      float* to, int64_t to_stride) {
  for (int64_t c = 0; c < columns; c += kLanes)
    for (int64_t r = 0; r < rows; r += kLanes) {
      vf x[kLanes];
      for (int i = 0; i < kLanes; i++) x[i] = load(from + (r + i) * from_stride + c);
      exchange<kLanes / 2>(x);
      for (int i = 0; i < kLanes; i++) store(to + (c + i) * to_stride + r, x[i]);
    }
}

}  // namespace modulm
