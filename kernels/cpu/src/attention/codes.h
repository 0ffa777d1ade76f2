// Eight-bit floats: a sign bit and the index of one of 128 magnitudes, all exact in bf16.
#pragma once

#include "base/vec.h"

namespace modulm {

struct E4M3 {  // no infinities, 0x7f is NaN
  static constexpr int mantissa = 3, bias = 7, largest = 0x7e;
  uint8_t bits;
};
struct E5M2 {
  static constexpr int mantissa = 2, bias = 15, largest = 0x7b;
  uint8_t bits;
};

// The nearest float code, ties to even, in the low byte of each lane. Values beyond the largest
// saturate; NaN stays NaN.
template <class Code>
inline vu narrow_code(vf x, Code) {
  constexpr int drop = 23 - Code::mantissa;
  vu sign = (vu)x >> 24 & 0x80u, u = (vu)x & 0x7fffffffu;
  vu normal = ((u + ((1u << (drop - 1)) - 1) + (u >> drop & 1u)) >> drop) -
              (uint32_t(127 - Code::bias) << Code::mantissa);
  // Subnormal numbers are rounded by an addition whose sum has the smallest code as its last bit.
  constexpr uint32_t magic = uint32_t(127 + 24 - Code::bias - Code::mantissa) << 23;
  vu small = (vu)((vf)u + (vf)(vu{} + magic)) - magic;
  vu code = (vi)u < int32_t(uint32_t(128 - Code::bias) << 23) ? small : normal;
  code = (vi)code > Code::largest ? vu{} + uint32_t(Code::largest) : code;
  code = (vi)u > 0x7f800000 ? vu{} + 0x7fu : code;
  return code | sign;
}

// Codes in bits 0-7 of each lane to fp32.
template <class Code>
inline vf widen_code(vu x, Code) {
  vu magnitude = x & 0x7fu;
  constexpr uint32_t least = uint32_t(128 - Code::bias - Code::mantissa) << 23;
  vf normal = (vf)((magnitude << (23 - Code::mantissa)) + (uint32_t(127 - Code::bias) << 23));
  vf subnormal = __builtin_convertvector((vi)magnitude, vf) * (vf)(vu{} + least);
  vf value = choose((vi)magnitude < (1 << Code::mantissa), subnormal, normal);
  value = choose((vi)magnitude > Code::largest, (vf)(vu{} + 0x7fc00000u), value);
  return (vf)((vu)value | (x & 0x80u) << 24);
}

#if defined(__AVX512VBMI__)
// Both bytes of the bf16 value of a magnitude, for vpermi2b.
template <class Code>
struct CodeTable {
  alignas(64) uint8_t low[128], high[128];
  CodeTable() {
    for (int i = 0; i < 128; i++) {
      float value = widen_code(vu{} + uint32_t(i), Code{})[0];
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      low[i] = uint8_t(bits >> 16);
      high[i] = uint8_t(bits >> 24);
    }
  }
};

// n lanes of two codes each, a multiple of 32, to lanes of two bf16.
template <class Code>
inline void decode_codes(const uint8_t* from, uint32_t* to, int64_t n, Code) {
  static const CodeTable<Code> table;
  __m512i low0 = _mm512_load_si512(table.low), low1 = _mm512_load_si512(table.low + 64);
  __m512i high0 = _mm512_load_si512(table.high), high1 = _mm512_load_si512(table.high + 64);
  const __m512i sign = _mm512_set1_epi8(char(0x80));
  // unpack works within 128-bit quarters; operands are arranged so that lanes stay in order.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (int64_t i = 0; i < n; i += 32) {
    __builtin_prefetch(from + 2 * i + 1024);
    __m512i x = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from + 2 * i));
    __m512i low = _mm512_permutex2var_epi8(low0, x, low1);
    __m512i high = _mm512_permutex2var_epi8(high0, x, high1);
    high = _mm512_ternarylogic_epi64(high, x, sign, 0xf8);  // high | (x & sign)
    _mm512_storeu_si512(to + i, _mm512_unpacklo_epi8(low, high));
    _mm512_storeu_si512(to + i + 16, _mm512_unpackhi_epi8(low, high));
  }
}
#else
template <class Code>
inline void decode_codes(const uint8_t* from, uint32_t* to, int64_t n, Code code) {
  for (int64_t i = 0; i < n; i += kLanes) {
    vu x = __builtin_convertvector(load_raw<vh>(from + 2 * i), vu);
    vu low = (vu)widen_code(x & 0xffu, code) >> 16;
    store_raw(to + i, low | ((vu)widen_code(x >> 8, code) & 0xffff0000u));
  }
}
#endif

}  // namespace modulm
