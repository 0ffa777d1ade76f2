// Rows in fixed point, as two planes of bytes, and the conversion of their sums to floats.
#pragma once

#include "attention/cache.h"

namespace modulm {

// A query is about scale * (128 * high + low) with both planes in int8.
struct FixedQuery {
  float scale;
  int32_t high, low;  // sums of the planes times 128, the offset of keys
};

inline FixedQuery split_query(const float* x, int64_t size, int8_t* high, int8_t* low) {
  constexpr float limit = 16319.0f;  // 127 * 128 + 63
  vf peak{};
  for (int64_t i = 0; i < size; i += kLanes) peak = vmax(peak, vmax(load(x + i), -load(x + i)));
  const float most = largest(peak), inverse = most > 0.0f ? limit / most : 0.0f;
  FixedQuery found{most / limit, 0, 0};
  for (int64_t i = 0; i < size; i += kLanes) {
    vi code = nearest(load(x + i) * inverse), upper = (code + 64) >> 7;
    store_raw(high + i, __builtin_convertvector((vu)upper, vb));
    store_raw(low + i, __builtin_convertvector((vu)(code - upper * 128), vb));
  }
  for (int64_t i = 0; i < size; i++) found.high += high[i] * 128, found.low += low[i] * 128;
  return found;
}

// Scores from the sums of both planes over keys plus 128.
inline void join_scores(const FixedQuery& q, const float* high, const float* low, int64_t columns,
                        float* to) {
  for (int64_t i = 0; i < columns; i += kLanes) {
    vf upper = __builtin_convertvector(load_raw<vi>(high + i) - q.high, vf);
    vf lower = __builtin_convertvector(load_raw<vi>(low + i) - q.low, vf);
    store(to + i, (upper * 128.0f + lower) * q.scale);
  }
}

// Weights from 0 to 1 in units of 1 / 65535.
inline void split_weights(vf x, uint8_t* high, uint8_t* low) {
  vu code = (vu)nearest(x * 65535.0f);
  store_raw(high, __builtin_convertvector(code >> 8, vb));
  store_raw(low, __builtin_convertvector(code & 0xffu, vb));
}

// Adds values from the sums of both planes; `unit` is the factor of a weight of 1.
inline void join_values(const float* high, const float* low, int64_t columns, float unit,
                        bool fresh, float* to) {
  for (int64_t i = 0; i < columns; i += kLanes) {
    vf upper = __builtin_convertvector(load_raw<vi>(high + i), vf);
    vf lower = __builtin_convertvector(load_raw<vi>(low + i), vf);
    vf sum = (upper * 256.0f + lower) * (unit / 65535.0f);
    store(to + i, fresh ? sum : load(to + i) + sum);
  }
}

}  // namespace modulm
