// Four products of bytes per 32-bit lane: unsigned weights with signed activations.
#pragma once

#include "base/vec.h"

namespace modulm {

// Lanes that the software prefetch runs ahead: for codes that many rows share; for few rows into
// the second-level cache, where more lines may be under way than the first one has room for, and
// from there on; for scales.
constexpr int kQuadsAhead = 1024, kQuadsFar = 768, kQuadsNear = 128, kScalesAhead = 512;

#if defined(__AVX512VNNI__)
inline uint32_t load_quad(const int8_t* p) { return load_raw<uint32_t>(p); }
inline vi quad_dot(vi sum, vu codes, uint32_t quad) {
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(int(quad)));
}
#elif defined(__AVX2__)
// Bytes 0 and 2, and bytes 1 and 3, as 16-bit pairs.
struct Quad {
  int32_t even, odd;
};
inline Quad load_quad(const int8_t* p) {
  return {(p[0] & 0xffff) | int32_t(uint32_t(p[2]) << 16),
          (p[1] & 0xffff) | int32_t(uint32_t(p[3]) << 16)};
}
inline vi quad_dot(vi sum, vu codes, Quad quad) {
  vu even = codes & 0x00ff00ffu, odd = codes >> 8 & 0x00ff00ffu;
#if defined(__AVX512F__)
  return sum + (vi)_mm512_madd_epi16((__m512i)even, _mm512_set1_epi32(quad.even)) +
         (vi)_mm512_madd_epi16((__m512i)odd, _mm512_set1_epi32(quad.odd));
#else
  return sum + (vi)_mm256_madd_epi16((__m256i)even, _mm256_set1_epi32(quad.even)) +
         (vi)_mm256_madd_epi16((__m256i)odd, _mm256_set1_epi32(quad.odd));
#endif
}
#else
inline const int8_t* load_quad(const int8_t* p) { return p; }
inline vi quad_dot(vi sum, vu codes, const int8_t* quad) {
  for (int i = 0; i < 4; i++) sum += (vi)(codes >> (8 * i) & 0xffu) * int32_t(quad[i]);
  return sum;
}
#endif

// a * b + c, rounded once where the level can. Compilers fuse or not as they see fit, which must
// not depend on the kernel around.
inline vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
inline vf fused(vf a, float b, vf c) { return fused(a, splat(b), c); }

}  // namespace modulm
