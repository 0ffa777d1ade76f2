// exp, tanh, erf, softplus on vectors, to a few units in the last place of fp32.
#pragma once

#include "base/vec.h"

namespace modulm {

// e^x: x = n ln 2 + r with |r| <= ln 2 / 2, a polynomial in r, n added to the exponent.
// 0 below -87.3 (no denormals), infinity above 88.7.
inline vf vexp(vf x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  vf shifted = x * 1.44269504f + magic;
  vf n = shifted - magic;
  vf r = x - n * 0.693145752f;
  r = r - n * 1.42860677e-6f;
  vf p = r * (1.0f / 720) + (1.0f / 120);
  p = p * r + (1.0f / 24);
  p = p * r + (1.0f / 6);
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  vf y = (vf)((vi)p + ((vi)shifted << 23));
  y = choose(x < -87.3f, vf{}, y);
  y = choose(x > 88.7f, splat(__builtin_inff()), y);
  return choose(x != x, x, y);
}

inline vf vtanh(vf x) {
  vf a = choose(x < 0.0f, -x, x);
  vf square = x * x;
  // Below 0.3 the quotient would cancel; the series x - x^3/3 + ... is exact enough there.
  vf small = square * (62.0f / 2835) - (17.0f / 315);
  small = small * square + (2.0f / 15);
  small = small * square - (1.0f / 3);
  small = small * square * x + x;
  vf t = 1.0f - 2.0f / (vexp(a * 2.0f) + 1.0f);
  t = choose(x < 0.0f, -t, t);
  return choose(a < 0.3f, small, t);
}

// Error function by its rational approximation 7.1.26 of Abramowitz and Stegun (1.5e-7 absolute).
inline vf verf(vf x) {
  vf a = choose(x < 0.0f, -x, x);
  vf t = 1.0f / (a * 0.3275911f + 1.0f);
  vf p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  vf y = 1.0f - p * t * vexp(-a * a);
  return choose(x < 0.0f, -y, y);
}

// log(1 + e^x) = max(x, 0) + 2 artanh(u / (2 + u)) with u = e^-|x|, whose series converges fast.
inline vf softplus(vf x) {
  vf u = vexp(choose(x < 0.0f, x, -x));
  vf s = u / (u + 2.0f), square = s * s;
  vf p = square * (1.0f / 13) + (1.0f / 11);
  p = p * square + (1.0f / 9);
  p = p * square + (1.0f / 7);
  p = p * square + (1.0f / 5);
  p = p * square + (1.0f / 3);
  p = p * square + 1.0f;
  vf y = s * 2.0f * p;
  return choose(x > 0.0f, x + y, y);
}

inline vf sigmoid(vf x) { return 1.0f / (vexp(-x) + 1.0f); }
inline vf silu(vf x) { return x / (vexp(-x) + 1.0f); }
inline vf gelu_erf(vf x) { return x * 0.5f * (verf(x * 0.707106781f) + 1.0f); }
inline vf gelu_tanh(vf x) {
  return x * 0.5f * (vtanh((x * x * x * 0.044715f + x) * 0.797884561f) + 1.0f);
}

}  // namespace modulm
