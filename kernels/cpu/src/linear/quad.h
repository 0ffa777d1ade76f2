// Four products of bytes per 32-bit lane: unsigned weights with signed activations.
#pragma once

#include "base/level.h"
#include "base/vec.h"

namespace modulm {

// Prefetch distances in lanes: for codes that many rows share; for few rows, into the second-level
// cache (which allows more loads in flight than the first) and from there into the first; for
// scales.
constexpr int kQuadsAhead = 1024, kQuadsFar = 768, kQuadsNear = 128, kScalesAhead = 512;
constexpr int kNibblesAhead = 2048;

// The distances for few rows on this processor, in lanes.
struct Distances {
  int64_t far = stream_distance(kQuadsFar), near = stream_distance(kQuadsNear);
};

// Memory that is needed next, prefetched in portions during another computation. All at once, it
// would fill the miss buffers and delay other loads.
class Ahead {
 public:
  Ahead() = default;
  // `bytes` from `from` on, in so many portions.
  Ahead(const void* from, int64_t bytes, int64_t portions)
      : at_(static_cast<const char*>(from)),
        lines_(div_up(bytes, 64)),
        portion_(div_up(lines_, portions < 1 ? 1 : portions)) {}

  void fetch() {
    for (int64_t i = 0; i < portion_ && lines_ > 0; i++, lines_--, at_ += 64)
      __builtin_prefetch(at_, 0, 2);
  }

  // The same without branches, for the innermost loops.
  void fetch_one() {
    for (int64_t i = portion_; i > 0; i--) {
      __builtin_prefetch(at_, 0, 2);
      const int64_t more = lines_ > 0;
      at_ += 64 * more;
      lines_ -= more;
    }
  }

 private:
  const char* at_ = nullptr;
  int64_t lines_ = 0, portion_ = 0;
};

#if defined(__AVX512VNNI__)
constexpr bool kQuadsFromMemory = true;  // reading the quad is free in a product
inline uint32_t load_quad(const int8_t* p) { return load_raw<uint32_t>(p); }
inline vi quad_dot(vi sum, vu codes, __m512i quad) {
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, quad);
}
inline vi quad_dot(vi sum, vu codes, uint32_t quad) {
  return quad_dot(sum, codes, _mm512_set1_epi32(int(quad)));
}
// In a register, for several products.
inline __m512i hold_quad(const int8_t* p) {
  __m512i quad = _mm512_set1_epi32(int(load_quad(p)));
  __asm__("" : "+v"(quad));
  return quad;
}
#elif defined(__AVX512F__)
constexpr bool kQuadsFromMemory = false;
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
  return sum + (vi)_mm512_madd_epi16((__m512i)even, _mm512_set1_epi32(quad.even)) +
         (vi)_mm512_madd_epi16((__m512i)odd, _mm512_set1_epi32(quad.odd));
}
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr bool kQuadsFromMemory = false;
inline vi load_quad(const int8_t* p) { return splat_int(load_raw<int32_t>(p)); }
inline vi quad_dot(vi sum, vu codes, vi quad) {
  return bits_as<vi>(
      dot_lanes(bits_as<lanes_s32>(sum), bits_as<lanes_u8>(codes), bits_as<lanes_s8>(quad)));
}
#else
constexpr bool kQuadsFromMemory = false;
inline const int8_t* load_quad(const int8_t* p) { return p; }
inline vi quad_dot(vi sum, vu codes, const int8_t* quad) {
  for (int i = 0; i < 4; i++) sum += (vi)(codes >> (8 * i) & 0xffu) * int32_t(quad[i]);
  return sum;
}
#endif

// Two products of 16 bits per lane.
inline vi pair_dot(vi sum, vu pairs, uint32_t pair) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)pairs, _mm512_set1_epi32(int(pair)));
#elif defined(__AVX512F__)
  return sum + (vi)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi32(int(pair)));
#elif defined(__AVX2__)
  return sum + (vi)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(int(pair)));
#else
  const vi low = (vi)(pairs << 16) >> 16, high = (vi)pairs >> 16;
  return sum + low * int32_t(int16_t(pair & 0xffffu)) + high * int32_t(int16_t(pair >> 16));
#endif
}

#if !defined(__AVX512VNNI__)
inline auto hold_quad(const int8_t* p) { return load_quad(p); }
#endif

// a * b + c, rounded once if the level has fused operations. Explicit, because a compiler's choice
// to fuse could differ between kernels.
inline vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return bits_as<vf>(
      fused_lanes(bits_as<lanes_f32>(a), bits_as<lanes_f32>(b), bits_as<lanes_f32>(c)));
#else
  return a * b + c;
#endif
}
inline vf fused(vf a, float b, vf c) { return fused(a, splat(b), c); }

}  // namespace modulm
