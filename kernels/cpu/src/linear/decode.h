// Quantized codes to bf16 pairs. All codes are exact in bf16; scales are applied later, in fp32.
#pragma once

#include "base/vec.h"
#include "linear/weight.h"

namespace modulm {

// The upper halves of two fp32 values whose lower halves are zero, side by side in a lane.
inline vu join(vf low, vf high) { return ((vu)low >> 16) | ((vu)high & 0xffff0000u); }

inline void ahead(const void* p, int bytes) { __builtin_prefetch(static_cast<const char*>(p) + bytes); }

// Distance of the software prefetch; the hardware prefetcher stops at 4 KB pages.
constexpr int kAhead = 2048;

// from: [k / 4][width] lanes of four codes + 128; to: [k / 2][width] pairs.
inline void decode_int8(const uint8_t* from, uint32_t* to, int64_t quads, int width) {
  for (int64_t q = 0; q < quads; q++, from += 4 * width, to += 2 * width)
    for (int c = 0; c < width; c += kLanes) {
      ahead(from + 4 * c, kAhead);
      vi x = (vi)(load_raw<vu>(from + 4 * c) ^ 0x80808080u);
      vf first = __builtin_convertvector(x << 24 >> 24, vf);
      vf second = __builtin_convertvector(x << 16 >> 24, vf);
      vf third = __builtin_convertvector(x << 8 >> 24, vf);
      vf fourth = __builtin_convertvector(x >> 24, vf);
      store_raw(to + c, join(first, second));
      store_raw(to + width + c, join(third, fourth));
    }
}

// One e4m3 value per lane, in bits 0-7, to fp32. With an exponent field the bits are moved and
// the exponent re-biased from 7 to 127; without one the value is mantissa * 2^-9.
inline vf widen_e4m3(vu x) {
  vu magnitude = x & 0x7fu;
  vf normal = (vf)((magnitude << 20) + (120u << 23));
  vf subnormal = __builtin_convertvector((vi)magnitude, vf) * 0x1p-9f;
  vf value = choose((vi)magnitude < 8, subnormal, normal);
  value = choose((vi)magnitude == 0x7f, (vf)(vu{} + 0x7fc00000u), value);
  return (vf)((vu)value | (x & 0x80u) << 24);
}

#if defined(__AVX512VBMI__)
// Both bytes of the bf16 value of a magnitude, 128 entries each, for vpermi2b.
struct TableE4M3 {
  alignas(64) uint8_t low[128], high[128];
  TableE4M3() {
    for (int i = 0; i < 128; i++) {
      uint32_t bits;
      float value = widen_e4m3(vu{} + uint32_t(i))[0];
      std::memcpy(&bits, &value, 4);
      low[i] = uint8_t(bits >> 16);
      high[i] = uint8_t(bits >> 24);
    }
  }
};

inline void decode_fp8(const uint8_t* from, uint32_t* to, int64_t n) {
  static const TableE4M3 table;
  __m512i low0 = _mm512_load_si512(table.low), low1 = _mm512_load_si512(table.low + 64);
  __m512i high0 = _mm512_load_si512(table.high), high1 = _mm512_load_si512(table.high + 64);
  const __m512i sign = _mm512_set1_epi8(char(0x80));
  // unpack works within 128-bit quarters; operands are arranged so that lanes stay in order.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (int64_t i = 0; i < n; i += 32) {
    ahead(from + 2 * i, kAhead);
    bool whole = i + 32 <= n;
    __m512i x = _mm512_maskz_loadu_epi64(whole ? 0xff : 0x0f, from + 2 * i);
    x = _mm512_permutexvar_epi64(order, x);
    __m512i low = _mm512_permutex2var_epi8(low0, x, low1);
    __m512i high = _mm512_permutex2var_epi8(high0, x, high1);
    high = _mm512_ternarylogic_epi64(high, x, sign, 0xf8);  // high | (x & sign)
    _mm512_storeu_si512(to + i, _mm512_unpacklo_epi8(low, high));
    if (whole) _mm512_storeu_si512(to + i + 16, _mm512_unpackhi_epi8(low, high));
  }
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
// Both bytes of the bf16 values of 32 codes, by lookups of 16 entries: of a magnitude (e, m) with
// an exponent field they are 0x3c00 + (magnitude << 4), of one without those of m * 2^-9.
struct LookupE4M3 {
  // Four of every eight pairs are in the first vector, four in the second.
  void operator()(const uint8_t* from, vu (&to)[2]) const {
    const auto all = [](int byte) { return _mm256_set1_epi8(char(byte)); };
    const __m256i low_of_mantissa = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, -0x80, -0x70, -0x60, -0x50, -0x40, -0x30,
        -0x20, -0x10));
    const __m256i low_of_small = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, -0x80, -0x40, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m256i high_of_small = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i magnitude = _mm256_and_si256(x, all(0x7f));
    const __m256i small = _mm256_cmpgt_epi8(all(8), magnitude);
    const __m256i nan = _mm256_cmpeq_epi8(magnitude, all(0x7f));
    const __m256i exponent =
        _mm256_add_epi8(_mm256_and_si256(_mm256_srli_epi16(magnitude, 4), all(7)), all(0x3c));
    __m256i low = _mm256_blendv_epi8(_mm256_shuffle_epi8(low_of_mantissa, magnitude),
                                     _mm256_shuffle_epi8(low_of_small, magnitude), small);
    __m256i high =
        _mm256_blendv_epi8(exponent, _mm256_shuffle_epi8(high_of_small, magnitude), small);
    low = _mm256_or_si256(low, nan);
    high = _mm256_or_si256(high, _mm256_and_si256(nan, all(0x7f)));
    high = _mm256_or_si256(high, _mm256_and_si256(x, all(0x80)));
    to[0] = (vu)_mm256_unpacklo_epi8(low, high);
    to[1] = (vu)_mm256_unpackhi_epi8(low, high);
  }

  // Restores the order of two vectors of pairs, or of the sums of their columns.
  static void sort(__m256i& first, __m256i& second) {
    const __m256i front = first;
    first = _mm256_permute2x128_si256(front, second, 0x20);
    second = _mm256_permute2x128_si256(front, second, 0x31);
  }
};

inline void decode_fp8(const uint8_t* from, uint32_t* to, int64_t n) {
  const LookupE4M3 lookup;
  for (int64_t i = 0; i < n; i += 2 * kLanes) {
    ahead(from + 2 * i, kAhead);
    vu pairs[2];
    lookup(from + 2 * i, pairs);
    auto first = (__m256i)pairs[0], second = (__m256i)pairs[1];
    lookup.sort(first, second);
    store_raw(to + i, first);
    store_raw(to + i + kLanes, second);
  }
}
#else
inline void decode_fp8(const uint8_t* from, uint32_t* to, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    vu x = __builtin_convertvector(load_raw<vh>(from + 2 * i), vu);
    store_raw(to + i, join(widen_e4m3(x & 0xffu), widen_e4m3(x >> 8)));
  }
}
#endif

// from: [k / 8][width] lanes of eight nibbles; to: [k / 2][width] pairs.
inline void decode_int4(const uint8_t* from, uint32_t* to, int64_t eights, int width) {
#if defined(__AVX512BW__)
  // Bit 4 of vpermw's index is arbitrary after the shift: the table is stored twice.
  alignas(64) static const uint16_t table[32] = {
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
      0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
      0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
  const __m512i values = _mm512_load_si512(table);
  for (int64_t e = 0; e < eights; e++)
    for (int c = 0; c < width; c += 16) {
      const uint8_t* source = from + (e * width + c) * 4;
      ahead(source, kAhead);
      __m512i x = _mm512_loadu_si512(source);
      uint32_t* target = to + e * 4 * width + c;
      _mm512_storeu_si512(target, _mm512_permutexvar_epi16(x, values));
      _mm512_storeu_si512(target + width,
                          _mm512_permutexvar_epi16(_mm512_srli_epi32(x, 4), values));
      _mm512_storeu_si512(target + 2 * width,
                          _mm512_permutexvar_epi16(_mm512_srli_epi32(x, 8), values));
      _mm512_storeu_si512(target + 3 * width,
                          _mm512_permutexvar_epi16(_mm512_srli_epi32(x, 12), values));
    }
#else
  for (int64_t e = 0; e < eights; e++)
    for (int c = 0; c < width; c += kLanes) {
      vu x = load_raw<vu>(from + (e * width + c) * 4);
      for (int j = 0; j < 4; j++) {
        vf low = __builtin_convertvector((vi)(x >> (4 * j) & 15u) - 8, vf);
        vf high = __builtin_convertvector((vi)(x >> (4 * j + 16) & 15u) - 8, vf);
        store_raw(to + (e * 4 + j) * width + c, join(low, high));
      }
    }
#endif
}

// `ks` k of a panel of this width, to pairs [ks / 2][width].
inline void decode(int format, const uint8_t* from, uint32_t* to, int64_t ks, int width) {
  if (format == kWeightInt4) decode_int4(from, to, ks / 8, width);
  else if (format == kWeightInt8) decode_int8(from, to, ks / 4, width);
  else decode_fp8(from, to, ks / 2 * width);
}

}  // namespace modulm
