// Rows in fixed point, and the conversion of their sums to floats. A row of queries has 15 bits; of
// weights, which are not negative, 16, or 15 where products of 16 bits have signs. They are two
// planes of bytes, `stride` apart, or where bytes have no product of their own, one plane of 16 bits.
// Sums are exact in 32 bits for heads of up to kMaxSize and chunks of tokens, in whatever order.
#pragma once

#include "attention/cache.h"
#include "base/pairs.h"

namespace modulm {

constexpr float kLargestQuery = 16319.0f;  // 127 * 128 + 63

// A query is about scale * its codes. offset: the sum of its codes times 128, the offset of keys.
struct FixedQuery {
  float scale;
  int32_t offset;
};

// a * b + c, rounded once where a level can: results must not depend on what a compiler fuses.
inline vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

// The largest magnitude.
inline float query_peak(const float* x, int64_t size) {
  vf peak{};
  for (int64_t i = 0; i < size; i += kLanes) peak = vmax(peak, vmax(load(x + i), -load(x + i)));
  return largest(peak);
}

// Codes of a query: f(offset, codes) for each vector.
template <class F>
inline FixedQuery fixed_query(const float* x, int64_t size, F&& f) {
  const float most = query_peak(x, size), inverse = most > 0.0f ? kLargestQuery / most : 0.0f;
  vi all{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const vi codes = nearest(load(x + i) * inverse);
    all += codes;
    f(i, codes);
  }
  return {most / kLargestQuery, sum(all) * 128};
}

// Scores of a vector of keys plus 128 from the sum of their products. scales: of the keys.
inline vf fixed_scores(vi sum, const FixedQuery& q, vf scales) {
  return __builtin_convertvector((vi)((vu)sum - uint32_t(q.offset)), vf) * q.scale * scales;
}

// `before` and a vector of values from the sum of their products. unit: of a weight of 1.
inline vf fixed_values(vi sum, float unit, vf before) {
  return fused(__builtin_convertvector(sum, vf), splat(unit), before);
}

#if defined(MODULM_WIDE_PAIRS)
using FixedElement = int16_t;
using FixedWeight = uint16_t;
constexpr int kFixedPlanes = 1;
constexpr float kLargestWeight = 32767.0f;

// Eight numbers of 16 bits in the order in which bytes of a line become pairs (attention/tile.h).
template <class T>
inline void store_pairs(T* to, vi codes) {
  typedef uint16_t eight __attribute__((vector_size(16)));
  const auto narrow = (eight)__builtin_convertvector((vu)codes, vh);
  store_raw(to, __builtin_shuffle(narrow, eight{0, 2, 1, 3, 4, 6, 5, 7}));
}

inline FixedQuery split_query(const float* x, int64_t size, int16_t* to, int64_t) {
  return fixed_query(x, size, [&](int64_t i, vi codes) { store_pairs(to + i, codes); });
}

// Weights times `shares`, codes of two vectors.
inline void split_weights(vf a, vf b, vf first, vf second, uint16_t* to, int64_t) {
  store_pairs(to, nearest(a * first));
  store_pairs(to + kLanes, nearest(b * second));
}

inline vi joined_scores(const float* sums, int64_t) { return load_raw<vi>(sums); }
inline vi joined_values(const float* sums, int64_t) { return load_raw<vi>(sums); }
#else
using FixedElement = int8_t;
using FixedWeight = uint8_t;
constexpr int kFixedPlanes = 2;
constexpr float kLargestWeight = 65535.0f;
constexpr int kQueryBits = 7, kWeightBits = 8;  // of the lower plane

inline FixedQuery split_query(const float* x, int64_t size, int8_t* high, int64_t stride) {
  return fixed_query(x, size, [&](int64_t i, vi codes) {
    const vi upper = (codes + (1 << (kQueryBits - 1))) >> kQueryBits;
    store_raw(high + i, narrow_bytes((vu)upper));
    store_raw(high + stride + i, narrow_bytes((vu)(codes - (upper << kQueryBits))));
  });
}

// Weights times `shares`, codes of two vectors.
inline void split_weights(vf a, vf b, vf first, vf second, uint8_t* high, int64_t stride) {
  const vf magic = splat(12582912.0f);  // as in `nearest`; its bits end in two zero bytes
  const vu low_codes = (vu)fused(a, first, magic), high_codes = (vu)fused(b, second, magic);
#if defined(__AVX512VBMI__)
  alignas(64) static constexpr auto kOrder = [] {
    struct { uint8_t at[64]; } order{};
    for (int i = 0; i < 32; i++) order.at[i] = uint8_t(4 * i + 1), order.at[32 + i] = uint8_t(4 * i);
    return order;
  }();
  const __m512i bytes = _mm512_permutex2var_epi8((__m512i)low_codes, _mm512_load_si512(kOrder.at),
                                                 (__m512i)high_codes);
  store_raw(high, _mm512_castsi512_si256(bytes));
  store_raw(high + stride, _mm512_extracti64x4_epi64(bytes, 1));
#else
  for (vu codes : {low_codes, high_codes}) {
    store_raw(high, narrow_bytes(codes >> kWeightBits));
    store_raw(high + stride, narrow_bytes(codes));
    high += kLanes;
  }
#endif
}

// The sum of both planes, which lie `stride` apart.
inline vi joined(const float* high, int64_t stride, int bits) {
  return (vi)((load_raw<vu>(high) << bits) + load_raw<vu>(high + stride));
}
inline vi joined_scores(const float* high, int64_t stride) {
  return joined(high, stride, kQueryBits);
}
inline vi joined_values(const float* high, int64_t stride) {
  return joined(high, stride, kWeightBits);
}
#endif

// Scores of a row from its sums over `columns` keys.
inline void join_scores(const FixedQuery& q, const float* sums, int64_t stride, int64_t columns,
                        const float* scales, float* to) {
  for (int64_t i = 0; i < columns; i += kLanes)
    store(to + i, fixed_scores(joined_scores(sums + i, stride), q, load(scales + i)));
}

// Adds values from sums, or replaces them.
inline void join_values(const float* sums, int64_t stride, int64_t columns, float unit, bool fresh,
                        float* to) {
  for (int64_t i = 0; i < columns; i += kLanes)
    store(to + i, fixed_values(joined_values(sums + i, stride), unit, fresh ? vf{} : load(to + i)));
}

}  // namespace modulm
