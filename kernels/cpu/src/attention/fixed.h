// Rows in fixed point, and the conversion of their sums to floats. A row of queries has 15 bits; of
// weights, which are not negative, 16, or 15 where products of 16 bits have signs. They are two
// planes of bytes, `stride` apart, or where bytes have no product of their own, one plane of 16 bits.
#pragma once

#include "attention/cache.h"
#include "base/pairs.h"

namespace modulm {

constexpr float kLargestQuery = 16319.0f;  // 127 * 128 + 63

// The largest magnitude.
inline float query_peak(const float* x, int64_t size) {
  vf peak{};
  for (int64_t i = 0; i < size; i += kLanes) peak = vmax(peak, vmax(load(x + i), -load(x + i)));
  return largest(peak);
}

#if defined(MODULM_WIDE_PAIRS)
using FixedElement = int16_t;
using FixedWeight = uint16_t;
constexpr int kFixedPlanes = 1;

// Eight numbers of 16 bits in the order in which bytes of a line become pairs (attention/tile.h).
template <class T>
inline void store_pairs(T* to, vi codes) {
  typedef uint16_t eight __attribute__((vector_size(16)));
  const auto narrow = (eight)__builtin_convertvector((vu)codes, vh);
  store_raw(to, __builtin_shuffle(narrow, eight{0, 2, 1, 3, 4, 6, 5, 7}));
}

struct FixedQuery {
  float scale;
  int32_t offset;  // the sum of its codes times 128, the offset of keys
};

inline FixedQuery split_query(const float* x, int64_t size, int16_t* to, int64_t) {
  const float most = query_peak(x, size), inverse = most > 0.0f ? kLargestQuery / most : 0.0f;
  FixedQuery found{most / kLargestQuery, 0};
  for (int64_t i = 0; i < size; i += kLanes) store_pairs(to + i, nearest(load(x + i) * inverse));
  for (int64_t i = 0; i < size; i++) found.offset += to[i] * 128;
  return found;
}

// Scores from sums over keys plus 128.
inline void join_scores(const FixedQuery& q, const float* sums, int64_t, int64_t columns,
                        float* to) {
  for (int64_t i = 0; i < columns; i += kLanes)
    store(to + i, __builtin_convertvector(load_raw<vi>(sums + i) - q.offset, vf) * q.scale);
}

// Weights from 0 to 1 in units of 1 / 32767.
inline void split_weights(vf x, uint16_t* to, int64_t) {
  store_pairs(to, nearest(x * 32767.0f));
}

// Adds values from sums; `unit` is the factor of a weight of 1.
inline void join_values(const float* sums, int64_t, int64_t columns, float unit, bool fresh,
                        float* to) {
  for (int64_t i = 0; i < columns; i += kLanes) {
    vf sum = __builtin_convertvector(load_raw<vi>(sums + i), vf) * (unit / 32767.0f);
    store(to + i, fresh ? sum : load(to + i) + sum);
  }
}
#else
using FixedElement = int8_t;
using FixedWeight = uint8_t;
constexpr int kFixedPlanes = 2;

// A query is about scale * (128 * high + low).
struct FixedQuery {
  float scale;
  int32_t high, low;  // sums of the planes times 128, the offset of keys
};

inline FixedQuery split_query(const float* x, int64_t size, int8_t* high, int64_t stride) {
  int8_t* low = high + stride;
  const float most = query_peak(x, size), inverse = most > 0.0f ? kLargestQuery / most : 0.0f;
  FixedQuery found{most / kLargestQuery, 0, 0};
  for (int64_t i = 0; i < size; i += kLanes) {
    vi code = nearest(load(x + i) * inverse), upper = (code + 64) >> 7;
    store_raw(high + i, __builtin_convertvector((vu)upper, vb));
    store_raw(low + i, __builtin_convertvector((vu)(code - upper * 128), vb));
  }
  for (int64_t i = 0; i < size; i++) found.high += high[i] * 128, found.low += low[i] * 128;
  return found;
}

// Scores from the sums of both planes over keys plus 128.
inline void join_scores(const FixedQuery& q, const float* high, int64_t stride, int64_t columns,
                        float* to) {
  const float* low = high + stride;
  for (int64_t i = 0; i < columns; i += kLanes) {
    vf upper = __builtin_convertvector(load_raw<vi>(high + i) - q.high, vf);
    vf lower = __builtin_convertvector(load_raw<vi>(low + i) - q.low, vf);
    store(to + i, (upper * 128.0f + lower) * q.scale);
  }
}

// Weights from 0 to 1 in units of 1 / 65535.
inline void split_weights(vf x, uint8_t* high, int64_t stride) {
  vu code = (vu)nearest(x * 65535.0f);
  store_raw(high, __builtin_convertvector(code >> 8, vb));
  store_raw(high + stride, __builtin_convertvector(code & 0xffu, vb));
}

// Adds values from the sums of both planes; `unit` is the factor of a weight of 1.
inline void join_values(const float* high, int64_t stride, int64_t columns, float unit, bool fresh,
                        float* to) {
  const float* low = high + stride;
  for (int64_t i = 0; i < columns; i += kLanes) {
    vf upper = __builtin_convertvector(load_raw<vi>(high + i), vf);
    vf lower = __builtin_convertvector(load_raw<vi>(low + i), vf);
    vf sum = (upper * 256.0f + lower) * (unit / 65535.0f);
    store(to + i, fresh ? sum : load(to + i) + sum);
  }
}
#endif

}  // namespace modulm
