// Products of activations as numbers of 16 bits, where bytes have no product of their own (AVX2):
// codes are widened to 16 bits anyway, so two digits cost no more than one.
//
// A row lies where two digits would, as pairs of 16 bits: of a quad of k first 0 and 2, then 1 and
// 3, which is how bytes of codes become pairs by a mask and by a shift. Sums of a run fit in 32 bits,
// 256 * 255 * 32639 < 2^31.
#pragma once

#include "linear/activations.h"
#include "linear/slice.h"

namespace modulm {

// Like `integer_sums`, for codes that are not in blocks. digits: twice the number of rows.
void wide_sums(const Weight& w, int64_t panel, const Activations& a, int64_t row, int64_t digits,
               float* sums);

#if defined(MODULM_WIDE_PAIRS)

// The pairs of a line, in the order of the activations.
constexpr int pairs_of_line(Lying kind) { return kind == kQuads || kind == kWidened ? 2 : 4; }

// Codes of 16 bits lie in squares of 16 columns, [k / 4][2 pairs][16 columns][2]: many rows share
// the work of widening. A step of a square and six rows of activations fit in a first-level cache.
constexpr int kSquareColumns = 2 * kLanes, kSquareLine = 2 * kSquareColumns;
constexpr int64_t kSquare = kStep / 4 * kSquareLine;  // lanes

template <Lying Kind>
inline __m256i wide_codes(vu line, int pair, const Lookup& code_of) {
  if constexpr (Kind == kNibbles) {
    if (pair == 3) return _mm256_srli_epi16((__m256i)line, 12);
    constexpr int shift[] = {0, 8, 4};
    return (__m256i)(line >> shift[pair] & 0x000f000fu);
  }
  const vu codes = codes_of<Kind>(line, pair / 2, code_of);
  return pair % 2 ? _mm256_srli_epi16((__m256i)codes, 8) : (__m256i)(codes & 0x00ff00ffu);
}

// Pair number `pair` of a line of two vectors: c[row][v] += its products with the rows, which are
// `stride` apart. With six rows all registers are in use, so a line is read again for each pair.
template <Lying Kind, int Rows>
[[gnu::always_inline]] inline void wide_pair(const int8_t* x, int64_t stride, const uint32_t* b,
                                             const Lookup& code_of, int pair, vi (&c)[Rows][2]) {
  __m256i first, second;
  if constexpr (Kind == kWidened) {
    first = load_raw<__m256i>(b + pair * kSquareColumns);
    second = load_raw<__m256i>(b + pair * kSquareColumns + kLanes);
  } else {
    first = wide_codes<Kind>(load_raw<vu>(b), pair, code_of);
    second = wide_codes<Kind>(load_raw<vu>(b + kLanes), pair, code_of);
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
    add_pairs(c[r][0], c[r][1], first, second, x + r * stride + 4 * pair);
  __asm__ volatile("" ::: "memory");
}

template <Lying Kind, int Rows>
[[gnu::always_inline]] inline void wide_line(const int8_t* x, int64_t stride, const uint32_t* b,
                                             const Lookup& code_of, vi (&c)[Rows][2]) {
  wide_pair<Kind>(x, stride, b, code_of, 0, c);
  wide_pair<Kind>(x, stride, b, code_of, 1, c);
  if constexpr (pairs_of_line(Kind) == 2) return;
  wide_pair<Kind>(x, stride, b, code_of, 2, c);
  wide_pair<Kind>(x, stride, b, code_of, 3, c);
}

// One row of one digit and plain nibbles: their products fit in 16 bits, eight of them, so both
// nibbles of a lane are multiplied in place. k that are summed in 16 bits:
constexpr int64_t kByteRun = 32;

// A row's digits, of each quad in the order of its bytes; ks: a multiple of 16.
inline void narrow_digits(const int8_t* x, int64_t ks, int8_t* to) {
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  for (int64_t k = 0; k < ks; k += 16) {
    const auto first = load_raw<__m128i>(x + 2 * k), second = load_raw<__m128i>(x + 2 * k + 16);
    store_raw(to + k, _mm_shuffle_epi8(_mm_packs_epi16(first, second), order));
  }
}

// c += kByteRun of a row of narrow_digits times a panel.
inline void add_nibbles(const int8_t* x, const uint32_t* b, vi (&c)[kPanel / kLanes]) {
  constexpr int vectors = kPanel / kLanes;
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i sums[vectors] = {};
#pragma GCC unroll 4
  for (int line = 0; line < kByteRun / 8; line++, b += kPanel, x += 8) {
    const __m256i first = load_pairs(x), second = load_pairs(x + 4);
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) {
      if (v % 2 == 0) {
        __builtin_prefetch(b + v * kLanes + kQuadsFar, 0, 2);
        __builtin_prefetch(b + v * kLanes + kQuadsNear);
      }
      const auto codes = load_raw<__m256i>(b + v * kLanes);
      add_bytes(sums[v], _mm256_and_si256(codes, mask), first);
      add_bytes(sums[v], _mm256_and_si256(_mm256_srli_epi16(codes, 4), mask), second);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < vectors; v++)
    c[v] += (vi)_mm256_madd_epi16(sums[v], _mm256_set1_epi16(1));
}

// Lines of a panel of this width to squares, which are kSquare lanes apart.
template <Lying Kind>
inline void widen_lines(const uint32_t* from, int width, int64_t lines, const Lookup& code_of,
                        uint32_t* to) {
  constexpr int count = pairs_of_line(Kind);
  for (int64_t i = 0; i < lines; i++, from += width, to += count * kSquareColumns)
    for (int c = 0; c < width; c += kLanes) {
      const vu line = load_raw<vu>(from + c);
      uint32_t* at = to + c / kSquareColumns * kSquare + c % kSquareColumns;
#pragma GCC unroll 4
      for (int p = 0; p < count; p++)
        store_raw(at + p * kSquareColumns, wide_codes<Kind>(line, p, code_of));
    }
}

// The same for one row and codes from memory, which are fetched ahead.
template <Lying Kind, int Far = kQuadsFar, int Vectors>
inline void wide_line_of_one(const int8_t* x, const uint32_t* b, const Lookup& code_of,
                             vi (&c)[1][Vectors]) {
  constexpr int count = pairs_of_line(Kind);
  __m256i pairs[count];
#pragma GCC unroll 4
  for (int p = 0; p < count; p++) pairs[p] = load_pairs(x + 4 * p);
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; v++) {
    if (v % 2 == 0) {
      __builtin_prefetch(b + v * kLanes + Far, 0, 2);
      __builtin_prefetch(b + v * kLanes + kQuadsNear);
    }
    const vu line = load_raw<vu>(b + v * kLanes);
#pragma GCC unroll 4
    for (int p = 0; p < count; p++)
      add_pairs(c[0][v], wide_codes<Kind>(line, p, code_of), pairs[p]);
  }
}

#endif

}  // namespace modulm
