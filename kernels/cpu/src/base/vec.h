// Vectors of fp32 lanes, as wide as the level's registers, on GCC's vector extensions.
//
// Arithmetic, comparison and ?: are the compiler's; this file adds loads and stores that convert
// from and to the storage types, partial ones for tails, and reductions in a fixed order.
#pragma once

#include <cstring>

#include "base/types.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include "base/arm.h"

// What levels have in common: 32 registers of vectors; products of four bytes, or of two bf16.
#if defined(__AVX512F__) || defined(__aarch64__)
#define MODULM_MANY_REGISTERS 1
#endif
#if defined(__AVX512VNNI__)
#define MODULM_QUAD_DOT 1
#endif
#if defined(__AVX512BF16__)
#define MODULM_BF16_DOT 1
#endif

namespace modulm {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__) || defined(MODULM_SVE256)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vf __attribute__((vector_size(kLanes * 4)));
typedef int32_t vi __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vu __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vh __attribute__((vector_size(kLanes * 2)));
typedef uint8_t vb __attribute__((vector_size(kLanes)));

inline vf splat(float x) { return vf{} + x; }
inline vi splat_int(int32_t x) { return vi{} + x; }

template <class V, class T>
inline V load_raw(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
template <class V, class T>
inline void store_raw(T* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

// Unsigned bytes to lanes. GCC 12 would convert a vector of bytes one element at a time.
inline vu widen_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(load_raw<vb>(p), vu);
#endif
}

// The low byte of each lane. GCC 12 would take them one by one.
inline vb narrow_bytes(vu x) {
#if defined(__AVX512F__)
  return (vb)_mm512_cvtepi32_epi8((__m512i)x);
#else
  return __builtin_convertvector(x, vb);
#endif
}

// Halves of a 32-bit lane that holds two bf16 values, as fp32: a shift and a mask.
inline vf low_half(vu pairs) { return (vf)(pairs << 16); }
inline vf high_half(vu pairs) { return (vf)(pairs & 0xffff0000u); }

inline vf widen(vh h, bf16) { return (vf)(__builtin_convertvector(h, vu) << 16); }

inline vf widen(vh h, fp16) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
  typedef __fp16 vq __attribute__((vector_size(kLanes * 2)));
  return __builtin_convertvector((vq)h, vf);
#else
  // Move exponent and mantissa up, then rescale by 2^112: this also turns denormals right.
  vu u = __builtin_convertvector(h, vu);
  vu magnitude = (u & 0x7fffu) << 13;
  vf scaled = (vf)magnitude * 0x1p112f;
  vu special = (vu)(magnitude >= 0x0f800000u) & 0x7f800000u;
  return (vf)((vu)scaled | special | ((u & 0x8000u) << 16));
#endif
}

inline vh narrow(vf x, bf16) {
#if defined(__AVX512BF16__)
  return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
  vu u = (vu)x;
  vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  vu nan = (vu)(x != x);
  return __builtin_convertvector((nan & 0x7fc0u) | (~nan & rounded), vh);
#endif
}

inline uint16_t narrow_fp16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  uint32_t sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return sign | 0x7e00u;
  if (u >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
  if (u < 0x38800000u) {                        // below 2^-14: let an fp32 addition round
    float magnitude, shifted;
    std::memcpy(&magnitude, &u, 4);
    shifted = magnitude + 0.5f;
    std::memcpy(&u, &shifted, 4);
    return sign | (u - 0x3f000000u);
  }
  return sign | ((u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13);
}

inline vh narrow(vf x, fp16) {
#if defined(__AVX512F__)
  return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  typedef __fp16 vq __attribute__((vector_size(kLanes * 2)));
  return (vh)__builtin_convertvector(x, vq);
#else
  vh h;
  for (int i = 0; i < kLanes; i++) h[i] = narrow_fp16(x[i]);
  return h;
#endif
}

inline vf load(const float* p) { return load_raw<vf>(p); }
template <class T>
inline vf load(const T* p) {
  return widen(load_raw<vh>(p), T{});
}
inline void store(float* p, vf x) { store_raw(p, x); }
template <class T>
inline void store(T* p, vf x) {
  store_raw(p, narrow(x, T{}));
}

// The first n < kLanes elements; the others read as zero and are not written.
template <class T>
inline vf load_some(const T* p, int n) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
template <class T>
inline void store_some(T* p, vf x, int n) {
  T buffer[kLanes];
  store(buffer, x);
  std::memcpy(p, buffer, n * sizeof(T));
}

// f(offset, lanes) over [0, n) in steps of a vector; load_n and store_n take its second argument.
template <class F>
inline void for_lanes(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
  if (i < n) f(i, int(n - i));
}
template <class T>
inline vf load_n(const T* p, int n) {
  return n == kLanes ? load(p) : load_some(p, n);
}
template <class T>
inline void store_n(T* p, vf x, int n) {
  if (n == kLanes) store(p, x);
  else store_some(p, x, n);
}

inline float load_one(const float* p) { return *p; }
inline float load_one(const bf16* p) {
  uint32_t u = uint32_t(p->bits) << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
inline float load_one(const fp16* p) { return load_some(p, 1)[0]; }
template <class T>
inline void store_one(T* p, float x) {
  store_some(p, splat(x), 1);
}

// Halves are added, always in this order.
#if defined(__AVX512F__)
inline float sum(vf x) { return _mm512_reduce_add_ps((__m512)x); }
inline float largest(vf x) { return _mm512_reduce_max_ps((__m512)x); }
inline int32_t sum(vi x) { return _mm512_reduce_add_epi32((__m512i)x); }
#else
inline float sum(vf x) {
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
}
inline int32_t sum(vi x) {
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
}
inline float largest(vf x) {
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
  return x[0];
}
#endif

inline vf choose(vi mask, vf yes, vf no) { return mask ? yes : no; }
inline vf vmax(vf a, vf b) { return a > b ? a : b; }

}  // namespace modulm
