// Codes of expert weights to bf16 pairs [k / 2][width], `ks` k at a time.
//
// All codes are exact in bf16; so are mxfp4 numbers times their scales, which are powers of 2.
#pragma once

#include "base/vec.h"
#include "moe/stack.h"

namespace modulm {

// The upper halves of two fp32 values whose lower halves are zero, side by side in a lane.
inline vu pack_halves(vf low, vf high) { return ((vu)low >> 16) | ((vu)high & 0xffff0000u); }

// Unsigned bytes to lanes. GCC 12 takes vectors of bytes apart where it is asked to convert them.
inline vu widen_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector(load_raw<vb>(p), vu);
#endif
}

// Codes are fetched this far ahead: the hardware's own prefetch stops at 4 KB pages.
constexpr int kCodesAhead = 4096;  // bytes

// Memory that is read up to `end`, and then from `following` on (null: nobody knows where).
struct Stream {
  const uint8_t* end;
  const uint8_t* following;

  void fetch_ahead(const uint8_t* p) const {
    p += kCodesAhead;
    if (p >= end && following) p = following + (p - end);
    __builtin_prefetch(p, 0, 2);
  }
};

inline void expand_int8(const uint8_t* from, uint32_t* to, int64_t lanes, const Stream& stream) {
  for (int64_t i = 0; i < lanes; i += kLanes) {
    stream.fetch_ahead(from + 2 * i);
#if defined(__AVX512BF16__)
    auto source = reinterpret_cast<const __m128i*>(from + 2 * i);
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(source)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(source + 1)));
    store_raw(to + i, _mm512_cvtne2ps_pbh(high, low));
#else
    vi x = (vi)__builtin_convertvector(load_raw<vh>(from + 2 * i), vu);
    vf low = __builtin_convertvector((x << 24) >> 24, vf);
    vf high = __builtin_convertvector((x << 16) >> 24, vf);
    store_raw(to + i, pack_halves(low, high));
#endif
  }
}

#if defined(__AVX512BW__)
// bf16 by nibble, twice: bit 4 of vpermw's index is whatever shift left there.
inline __m512i nibble_table(const uint16_t (&values)[16]) {
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
  return _mm512_broadcast_i64x4(half);
}
// -8 to 7
constexpr uint16_t kInt4Values[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
                                      0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040,
                                      0x4080, 0x40a0, 0x40c0, 0x40e0};
// 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same negative
constexpr uint16_t kE2M1Values[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
                                      0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0,
                                      0xc000, 0xc040, 0xc080, 0xc0c0};
#else
inline vf e2m1(vu nibble) {
  vi exponent = (vi)(nibble >> 1 & 3u), mantissa = (vi)(nibble & 1u);
  vi halves = exponent == 0 ? mantissa : (mantissa + 2) << (exponent - 1);
  vf value = __builtin_convertvector(halves, vf) * 0.5f;
  return (vf)((vu)value | (nibble & 8u) << 28);
}
#endif

inline void expand_int4(const uint8_t* from, uint32_t* to, int64_t ks, int width,
                        const Stream& stream) {
#if defined(__AVX512BW__)
  const __m512i values = nibble_table(kInt4Values);
#endif
  for (int64_t e = 0; e < ks / 8; e++)
    for (int c = 0; c < width; c += kLanes) {
      const uint8_t* source = from + (e * width + c) * 4;
      stream.fetch_ahead(source);
      vu x = load_raw<vu>(source);
      for (int j = 0; j < 4; j++) {
        uint32_t* target = to + (e * 4 + j) * width + c;
#if defined(__AVX512BW__)
        store_raw(target, _mm512_permutexvar_epi16((__m512i)(x >> (4 * j)), values));
#else
        vf low = __builtin_convertvector((vi)(x >> (4 * j) & 15u) - 8, vf);
        vf high = __builtin_convertvector((vi)(x >> (4 * j + 16) & 15u) - 8, vf);
        store_raw(target, pack_halves(low, high));
#endif
      }
    }
}

// scales: [ks / 32][width]. Those below 2^-125 count as 2^-125, so that exponents can be added.
inline void expand_mxfp4(const uint8_t* from, const uint8_t* scales, uint32_t* to, int64_t ks,
                         int width, const Stream& stream) {
#if defined(__AVX512BW__)
  const __m512i values = nibble_table(kE2M1Values), magnitude = _mm512_set1_epi16(0x7fff);
#endif
  for (int64_t block = 0; block < ks / kMXBlock; block++)
    for (int c = 0; c < width; c += kLanes) {
      vi biased = (vi)widen_bytes(scales + block * width + c);
      vi exponent = (biased < 2 ? splat_int(2) : biased) - 127;
#if defined(__AVX512BW__)
      vi both = (exponent << 7 & 0xffff) | exponent << 23;
#else
      vf scale = (vf)((exponent + 127) << 23);
#endif
      for (int e = 0; e < 4; e++) {
        const uint8_t* source = from + ((block * 4 + e) * width + c) * 4;
        stream.fetch_ahead(source);
        vu x = load_raw<vu>(source);
        for (int j = 0; j < 4; j++) {
          uint32_t* target = to + ((block * 4 + e) * 4 + j) * width + c;
#if defined(__AVX512BW__)
          __m512i value = _mm512_permutexvar_epi16((__m512i)(x >> (4 * j)), values);
          __mmask32 nonzero = _mm512_test_epi16_mask(value, magnitude);
          store_raw(target, _mm512_mask_add_epi16(value, nonzero, value, (__m512i)both));
#else
          vu pair = x >> (4 * j);
          store_raw(target, pack_halves(e2m1(pair & 15u) * scale, e2m1(pair >> 16 & 15u) * scale));
#endif
        }
      }
    }
}

// `ks` k from k on, to pairs.
inline void expand(const PanelOf& p, int64_t k, int64_t ks, uint32_t* to, const Stream& stream) {
  const uint8_t* from = p.data + p.s.bytes(k, p.width);
  const uint8_t* scales = p.s.format == kStackMXFP4 ? p.block_scales() : nullptr;
  switch (p.s.format) {
    case kStackInt8: return expand_int8(from, to, ks / 2 * p.width, stream);
    case kStackInt4: return expand_int4(from, to, ks, p.width, stream);
    default: return expand_mxfp4(from, scales + k / kMXBlock * p.width, to, ks, p.width, stream);
  }
}

}  // namespace modulm
