// The inner product kernel on tile registers (AMX): 16 rows x 16 columns x 32 k per instruction.
//
// A tile of `a` is 16 rows of 32 k as they lie; one of `b` is 16 pairs of 16 columns, as packed.
// All row counts go through the tiles, one row too: weights stream from memory far slower than
// the tiles multiply, and a row's result is the same in every batch.
#pragma once

#include <immintrin.h>

#include <initializer_list>

#include "linear/weight.h"

namespace modulm {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Registers: 0-3 sums, 4-5 a, 6-7 b. Sums 0, 1 and a 4 have `first` rows, the others `second`.
inline void configure(int first, int second) {
  TileConfig config;
  for (int t = 0; t < 8; t++) config.bytes[t] = 64;
  for (int t : {0, 1, 4}) config.rows[t] = uint8_t(first);
  for (int t : {2, 3, 5}) config.rows[t] = uint8_t(second);
  for (int t : {6, 7}) config.rows[t] = 16;
  _tile_loadconfig(&config);
}

// The row counts that this thread's tiles are set up for; `release` frees them, which lets the
// core and the scheduler forget 8 KB of state.
struct Tiles {
  int first = 0, second = 0;
  void shape(int rows) {
    int a = rows < 16 ? rows : 16, b = rows > 16 ? rows - 16 : a;
    if (a == first && b == second) return;
    configure(first = a, second = b);
  }
  void release() {
    if (first) _tile_release();
    first = second = 0;
  }
};
inline thread_local Tiles tiles;

inline void prefetch_lines(const char* p, int lines) {
  for (int i = 0; i < lines; i++) _mm_prefetch(p + 64 * i, _MM_HINT_T0);
}

// Up to 16 rows, 64 columns: four sums share one tile of a. All have the same number of rows.
inline void amx_row(const bf16* a, int64_t lda, const uint32_t* b, int64_t ldb, int64_t pairs,
                    float* sums, bool stream) {
  constexpr int stride = kPanel * 4;
  const int64_t step = ldb * 4;
  _tile_loadd(0, sums, stride);
  _tile_loadd(1, sums + 16, stride);
  _tile_loadd(2, sums + 32, stride);
  _tile_loadd(3, sums + 48, stride);
  for (int64_t k = 0; k < pairs; k += 16, b += 16 * ldb) {
    const char* next = reinterpret_cast<const char*>(b) + 8192;
    if (stream) prefetch_lines(next, 32);
    _tile_loadd(4, a + 2 * k, lda * 2);
    _tile_loadd(6, b, step);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + 16, step);
    _tile_dpbf16ps(1, 4, 7);
    if (stream) prefetch_lines(next + 2048, 32);
    _tile_loadd(6, b + 32, step);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, b + 48, step);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, sums, stride);
  _tile_stored(1, sums + 16, stride);
  _tile_stored(2, sums + 32, stride);
  _tile_stored(3, sums + 48, stride);
}

// 17 to 32 rows, 32 columns.
inline void amx_square(const bf16* a, int64_t lda, const uint32_t* b, int64_t ldb, int64_t pairs,
                       float* sums) {
  constexpr int stride = kPanel * 4;
  float* below = sums + 16 * kPanel;
  _tile_loadd(0, sums, stride);
  _tile_loadd(1, sums + 16, stride);
  _tile_loadd(2, below, stride);
  _tile_loadd(3, below + 16, stride);
  for (int64_t k = 0; k < pairs; k += 16, b += 16 * ldb) {
    _tile_loadd(6, b, ldb * 4);
    _tile_loadd(4, a + 2 * k, lda * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + 16, ldb * 4);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + 16 * lda + 2 * k, lda * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, stride);
  _tile_stored(1, sums + 16, stride);
  _tile_stored(2, below, stride);
  _tile_stored(3, below + 16, stride);
}

// Any rows, 16 columns.
inline void amx_column(int rows, const bf16* a, int64_t lda, const uint32_t* b, int64_t ldb,
                       int64_t pairs, float* sums) {
  constexpr int stride = kPanel * 4;
  float* below = sums + 16 * kPanel;
  bool two = rows > 16;
  _tile_loadd(0, sums, stride);
  if (two) _tile_loadd(2, below, stride);
  for (int64_t k = 0; k < pairs; k += 16, b += 16 * ldb) {
    _tile_loadd(6, b, ldb * 4);
    _tile_loadd(4, a + 2 * k, lda * 2);
    _tile_dpbf16ps(0, 4, 6);
    if (two) {
      _tile_loadd(5, a + 16 * lda + 2 * k, lda * 2);
      _tile_dpbf16ps(2, 5, 6);
    }
  }
  _tile_stored(0, sums, stride);
  if (two) _tile_stored(2, below, stride);
}

inline void amx_multiply(int rows, const bf16* a, int64_t lda, const uint32_t* b, int width,
                         int64_t ldb, int64_t pairs, float* sums, bool stream) {
  tiles.shape(rows);
  if (rows <= 16 && width == kPanel) return amx_row(a, lda, b, ldb, pairs, sums, stream);
  int c = 0;
  if (rows > 16)
    for (; c + 32 <= width; c += 32) amx_square(a, lda, b + c, ldb, pairs, sums + c);
  for (; c < width; c += 16) amx_column(rows, a, lda, b + c, ldb, pairs, sums + c);
}

}  // namespace modulm
