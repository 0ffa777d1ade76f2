// The inner product kernel: sums[rows][64] += a[rows][2 pairs] * b[pairs][0..width][2], in bf16.
// Successive pairs of b are `ldb` lanes apart.
//
// For one (row, column) the sum runs over k in order in one fp32 accumulator, whatever the number
// of rows, so that the result of a row does not depend on other rows. The sums pass through memory
// between calls, exactly.
#pragma once

#include "base/vec.h"
#include "linear/quad.h"
#include "linear/weight.h"

#if defined(__AMX_BF16__)
#include "linear/amx.h"
#endif

namespace modulm {

constexpr int kStreamAhead = 1024;  // lanes
// The same for what has been fetched before: a processor drops prefetches while too many are in
// flight, and their lines would be waited for.
constexpr int kAgainAhead = 2048;

#if defined(__AVX512BF16__)
constexpr int kTileRows = 6, kTileVectors = 4;  // 24 accumulators, 4 lines, broadcasts in place
constexpr int kMostTileRows = 7;  // fast enough for weights in memory, slower than 6 from a cache
inline vf pair_dot(vf sum, vu line, uint32_t pair) {
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)line, (__m512bh)_mm512_set1_epi32(int(pair)));
}
#elif defined(MODULM_BF16_DOT)
constexpr int kTileRows = 6, kTileVectors = 4;
inline vf pair_dot(vf sum, vu line, uint32_t pair) {
  return bits_as<vf>(dot_lanes(bits_as<lanes_f32>(sum), bits_as<lanes_bf16>(line),
                               bits_as<lanes_bf16>(vu{} + pair)));
}
#elif defined(MODULM_MANY_REGISTERS)
constexpr int kTileRows = 4, kTileVectors = 4;
#elif defined(__AVX2__)
constexpr int kTileRows = 6;  // see halves_tile
#else
constexpr int kTileRows = 2, kTileVectors = 4;
#endif

#if defined(__AMX_BF16__)
constexpr int kBlockRows = 32;  // rows that one call may have at most
#else
constexpr int kBlockRows = kTileRows;
#endif

// Tiles whose sums are scaled as they are stored.
#if !defined(__AMX_BF16__) && (defined(__AVX512F__) || !defined(__AVX2__))
#define MODULM_SCALED_TILES 1
#endif

#if defined(__AVX2__) || defined(MODULM_MANY_REGISTERS)
constexpr int kFloatRows = 6;
#else
constexpr int kFloatRows = 2;
#endif

// width: 16, 32, 48 or 64. rows: 1 to kBlockRows, or with products of pairs kMostTileRows. pairs: a
// multiple of 16. `stream`: b is read from memory sequentially, so prefetch it. `next`: what is
// needed after it, fetched in a portion for each pair, except by tile registers and AVX2.
void multiply(int rows, const bf16* a, int64_t lda, const uint32_t* b, int width, int64_t ldb,
              int64_t pairs, float* sums, bool stream = false, Ahead* next = nullptr);

#if defined(MODULM_SCALED_TILES)
// sums[rows][64] += scales[0..width] * (a[rows][2 pairs] * b[pairs][0..width][2]), the product in
// fp32, begun at zero.
void add_product(int rows, const bf16* a, int64_t lda, const uint32_t* b, int width, int64_t pairs,
                 const float* scales, float* sums);
#endif

// As `multiply` for weights in fp32 or fp16: sums[rows][64] += a[rows][ks] * b[ks][0..width], a in
// fp32; rows: 1 to kFloatRows.
void multiply_floats(int rows, const float* a, int64_t lda, const float* b, int width, int64_t ks,
                     float* sums, bool stream);
void multiply_floats(int rows, const float* a, int64_t lda, const fp16* b, int width, int64_t ks,
                     float* sums, bool stream);

}  // namespace modulm
