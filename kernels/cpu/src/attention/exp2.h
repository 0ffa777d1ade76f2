// 2^t for the softmax, whose scores are scaled by log2(e).
#pragma once

#include "base/vec.h"

namespace modulm {

constexpr float kLog2E = 1.44269504f;

// 2^r for r in [0, 1], minimax with 2^0 exact: to 9e-5 for weights that become bf16, else 2e-9.
template <bool Coarse>
inline vf exp2_fraction(vf r) {
  if constexpr (Coarse) {
    vf p = r * 0.0770670921f + 0.227644935f;
    p = p * r + 0.695116818f;
    return p * r + 1.0f;
  }
  vf p = r * 0.000216129221f + 0.00124678446f;
  p = p * r + 0.00967545155f;
  p = p * r + 0.0554852821f;
  p = p * r + 0.240229309f;
  p = p * r + 0.693147063f;
  return p * r + 1.0f;
}

// 2^t for t <= 0 or so, 0 for -infinity.
template <bool Coarse>
inline vf vexp2(vf t) {
#if defined(__AVX512DQ__)
  constexpr int floor_mode = 1;
  __m512 r = _mm512_reduce_ps((__m512)t, floor_mode);
  return (vf)_mm512_scalef_ps((__m512)exp2_fraction<Coarse>((vf)r), (__m512)t);
#else
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  vf shifted = (t - 0.5f) + magic;
  vf y = exp2_fraction<Coarse>(t - (shifted - magic));
  y = (vf)((vi)y + ((vi)shifted << 23));
  return choose(t < -126.0f, vf{}, y);
#endif
}

// 2^(a - b) where a <= b; 1 if they are equal, -infinity included.
inline float decay(float a, float b) { return a == b ? 1.0f : vexp2<false>(splat(a - b))[0]; }

}  // namespace modulm
