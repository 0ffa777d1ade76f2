// Few rows in bf16 with fp8 weights, which are decoded in registers.
//
// A row gets the same bits as from the kernel for more rows (tile.h); see few.h.
#pragma once

#include "linear/decode.h"
#include "linear/few.h"

namespace modulm {

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#define MODULM_FP8_IN_REGISTERS 1
#if defined(__AMX_BF16__)
constexpr int kFP8Rows = 4, kFP8Blocks = 1;  // tiles are faster for more
#else
constexpr int kFP8Rows = 6, kFP8Blocks = 3;
#endif

// Codes to pairs: four of every eight columns are in the first vector, four in the second.
class DecoderE4M3 {
 public:
  DecoderE4M3()
      : low_{_mm512_load_si512(table_.low), _mm512_load_si512(table_.low + 64)},
        high_{_mm512_load_si512(table_.high), _mm512_load_si512(table_.high + 64)} {}

  void operator()(const uint8_t* from, vu (&to)[2]) const {
    __m512i x = _mm512_loadu_si512(from);
    __m512i low = _mm512_permutex2var_epi8(low_[0], x, low_[1]);
    __m512i high = _mm512_permutex2var_epi8(high_[0], x, high_[1]);
    high = _mm512_ternarylogic_epi64(high, x, _mm512_set1_epi8(char(0x80)), 0xf8);
    to[0] = (vu)_mm512_unpacklo_epi8(low, high);
    to[1] = (vu)_mm512_unpackhi_epi8(low, high);
  }

  // Restores the order of columns.
  static void sort(float* columns) {
    __m512i first = _mm512_loadu_si512(columns), second = _mm512_loadu_si512(columns + 16);
    const __m512i front = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i back = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(columns, _mm512_permutex2var_epi64(first, front, second));
    _mm512_storeu_si512(columns + 16, _mm512_permutex2var_epi64(first, back, second));
  }

 private:
  static inline const TableE4M3 table_;
  __m512i low_[2], high_[2];
};
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define MODULM_FP8_IN_REGISTERS 1
constexpr int kFP8Rows = 2, kFP8Blocks = 1;  // a buffer is faster for more

struct FlushDenormals {};

inline vf pair_dot(vf sum, vu line, uint32_t pair) {
  const vu both = vu{} + pair;
  sum = fused(low_half(line), low_half(both), sum);
  return fused(high_half(line), high_half(both), sum);
}

class DecoderE4M3 {
 public:
  void operator()(const uint8_t* from, vu (&to)[2]) const { lookup_(from, to); }

  static void sort(float* columns) {
    auto first = load_raw<__m256i>(columns), second = load_raw<__m256i>(columns + kLanes);
    LookupE4M3::sort(first, second);
    store_raw(columns, first);
    store_raw(columns + kLanes, second);
  }

 private:
  LookupE4M3 lookup_;
};
#endif

#if defined(MODULM_FP8_IN_REGISTERS)
constexpr int kFP8Columns = 2 * kLanes;  // of a line of codes
constexpr int kFP8Pairs = 16;            // of k that a tile has
// The most if a tile asks for what follows: fewer sums are stored.
constexpr int kFP8FollowedPairs = 128;

#if defined(__AMX_BF16__)
using FP8Input = float;

// 16 pairs of k, two vectors of columns; sums are not sorted. Not inlined: see few_pairs.
template <int Rows, bool>
[[gnu::noinline]] void fp8_square(const DecoderE4M3& decode, const float* x, int64_t ldx,
                                  const uint8_t* codes, int64_t ldb, int, int64_t far,
                                  float* sums) {
  const int64_t near = stream_distance(kNearAhead);
  vf even[Rows][2] = {}, odd[Rows][2] = {};
  for (int k = 0; k < kFP8Pairs; k++, codes += ldb) {
    __builtin_prefetch(codes + far, 0, 2);
    __builtin_prefetch(codes + near);
    vu pairs[2];
    decode(codes, pairs);
#pragma GCC unroll 8
    for (int v = 0; v < 2; v++)
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++) {
        even[r][v] = fused(low_half(pairs[v]), x[r * ldx + 2 * k], even[r][v]);
        odd[r][v] = fused(high_half(pairs[v]), x[r * ldx + 2 * k + 1], odd[r][v]);
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < 2; v++) {
      float* to = sums + r * kPanel + v * kLanes;
      store(to, load(to) + (even[r][v] + odd[r][v]));
    }
}
#else
using FP8Input = bf16;

template <int Rows, bool Followed>
[[gnu::noinline]] void fp8_square(const DecoderE4M3& decode, const bf16* x, int64_t ldx,
                                  const uint8_t* codes, int64_t ldb, int pairs_of_k, int64_t far,
                                  float* sums) {
  const int64_t near = stream_distance(kNearAhead);
  vf c[Rows][2];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < 2; v++) c[r][v] = load(sums + r * kPanel + v * kLanes);
  const int count = Followed ? pairs_of_k : kFP8Pairs;
  for (int k = 0; k < count; k++, codes += ldb) {
    __builtin_prefetch(codes + far, 0, 2);
    __builtin_prefetch(codes + near);
    vu pairs[2];
    decode(codes, pairs);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
      uint32_t pair = load_raw<uint32_t>(x + r * ldx + 2 * k);
#pragma GCC unroll 8
      for (int v = 0; v < 2; v++) c[r][v] = pair_dot(c[r][v], pairs[v], pair);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < 2; v++) store(sums + r * kPanel + v * kLanes, c[r][v]);
}
#endif

template <int Rows, bool Followed>
inline void fp8_rows(const FP8Input* x, int64_t ldx, const uint8_t* codes, int width, int64_t ks,
                     int64_t far, float* sums) {
  const DecoderE4M3 decode;
  [[maybe_unused]] FlushDenormals flush;
  constexpr int most = Followed ? kFP8FollowedPairs : kFP8Pairs;
  const int64_t ldb = 2 * width;
  for (int64_t k = 0; k < ks; k += 2 * most, codes += most * ldb) {
    const int64_t left = (ks - k) / 2;
    const int count = left < most ? int(left) : most;
    for (int c = 0; c < width; c += kFP8Columns)
      fp8_square<Rows, Followed>(decode, x + k, ldx, codes + 2 * c, ldb, count, far, sums + c);
  }
  for (int r = 0; r < Rows; r++)
    for (int c = 0; c < width; c += kFP8Columns) decode.sort(sums + r * kPanel + c);
}

// Whether codes are decoded in registers, again for every kFP8Rows rows: lookups run beside
// products. Processors that stream by themselves do so for more rows (ADR 0363), fewer if each
// group's sums are scaled.
inline bool fp8_in_registers(int64_t rows, int width, bool grouped) {
  const int blocks = kFP8Blocks == 1 || !streams_by_itself ? kFP8Blocks : grouped ? 7 : 11;
  return rows <= kFP8Rows * blocks && width % kFP8Columns == 0;
}

template <bool Followed>
inline void fp8_rows_of(int64_t rows, const FP8Input* x, int64_t ldx, const uint8_t* codes,
                        int width, int64_t ks, int64_t far, float* sums) {
  switch (rows) {
    case 1: return fp8_rows<1, Followed>(x, ldx, codes, width, ks, far, sums);
    case 2: return fp8_rows<2, Followed>(x, ldx, codes, width, ks, far, sums);
#if defined(MODULM_MANY_REGISTERS)
    case 3: return fp8_rows<3, Followed>(x, ldx, codes, width, ks, far, sums);
    case 4: return fp8_rows<4, Followed>(x, ldx, codes, width, ks, far, sums);
    case 5: return fp8_rows<5, Followed>(x, ldx, codes, width, ks, far, sums);
    case 6: return fp8_rows<6, Followed>(x, ldx, codes, width, ks, far, sums);
#endif
  }
}

// sums[rows][64] = x[rows][ks] * codes[ks / 2][width][2]; sums are zero before. ks: a multiple of
// 32. rows: 1 to kFP8Rows. far: bytes to what is fetched meanwhile, a line for each that is read;
// followed: that is what the next call reads.
inline void multiply_fp8(int64_t rows, const FP8Input* x, int64_t ldx, const uint8_t* codes,
                         int width, int64_t ks, int64_t far, bool followed, float* sums) {
  if constexpr (kFP8Blocks > 1)
    if (followed) return fp8_rows_of<true>(rows, x, ldx, codes, width, ks, far, sums);
  fp8_rows_of<false>(rows, x, ldx, codes, width, ks, far, sums);
}
#else
using FP8Input = bf16;
constexpr int kFP8Rows = 1;
inline bool fp8_in_registers(int64_t, int, bool) { return false; }
inline void multiply_fp8(int64_t, const FP8Input*, int64_t, const uint8_t*, int, int64_t, int64_t,
                         bool, float*) {}
#endif

}  // namespace modulm
