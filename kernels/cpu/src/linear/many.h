// Many rows in bf16 through tile registers: 32 rows x 32 columns are summed while k runs.
//
// x is copied so that its tiles are 1 KB in one run: rows further apart share few of the first-level
// cache's sets, and no prefetcher follows them. 32 columns of a chunk stay in that cache while rows
// stream past them from the second level.
#pragma once

#if defined(__AMX_BF16__)

#include <cstring>

#include "base/vec.h"
#include "linear/amx.h"

namespace modulm {

constexpr int kSquareRows = 32, kSquareColumns = 32;
constexpr int kSquare = kSquareRows * kSquareColumns;
constexpr int64_t kTileK = 32;        // k of a tile
constexpr int64_t kManyChunk = 256;   // k of a chunk: 16 KB of 32 columns
constexpr int kSumLines = 8;          // of the next sums, fetched in each step of a chunk

// Rows of x as [padded k / 32][32 rows][32 k]; rows past the last are whatever was there.
template <class T>
void copy_row_tiles(const T* x, int64_t ldx, int64_t rows, int64_t k, int64_t padded, bf16* to) {
  for (int64_t r = 0; r < rows; r++, x += ldx, to += kTileK)
    for (int64_t i = 0; i < padded; i += kTileK) {
      int64_t there = k - i < 0 ? 0 : k - i < kTileK ? k - i : kTileK;
      bf16* line = to + i * kSquareRows;
      if (there < kTileK) std::memset(line, 0, kTileK * sizeof(bf16));
      for_lanes(there, [&](int64_t c, int n) { store_n(line + c, load_n(x + i + c, n), n); });
    }
}

struct Square {
  const bf16* a;      // [steps][2][16 rows][32 k]
  const uint32_t* b;  // [steps][16 pairs][ldb]
  int64_t ldb;
  int right;  // where the second 16 columns are: 16, or 0 where there are none
  int64_t steps;
  bool fresh;             // nothing has been summed yet
  const bf16* following;  // the rows whose turn is next
  const char* fetch;      // memory to bring to the second-level cache meanwhile
  int lines;              // of it in each step
};

// sums[2][2][16][16] += a * b; the sums behind them are fetched.
inline void amx_add_square(Square s, float* sums) {
  if (s.fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
    _tile_loadd(2, sums + 512, 64);
    _tile_loadd(3, sums + 768, 64);
  }
  const int64_t stride = s.ldb * 4;
  auto ahead = reinterpret_cast<const char*>(sums + kSquare);
  for (int64_t i = 0; i < s.steps; i++, s.a += 1024, s.b += 16 * s.ldb) {
    auto next = reinterpret_cast<const char*>(i + 1 < s.steps ? s.a + 1024 : s.following);
    _tile_loadd(6, s.b, stride);
    _tile_loadd(4, s.a, 64);
    _tile_dpbf16ps(0, 4, 6);
    prefetch_lines(next, 16);
    _tile_loadd(7, s.b + s.right, stride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, s.a + 512, 64);
    prefetch_lines(next + 1024, 16);
    _tile_dpbf16ps(2, 5, 6);
    prefetch_lines(ahead + i * kSumLines * 64, kSumLines);
    for (int l = 0; l < s.lines; l++, s.fetch += 64) _mm_prefetch(s.fetch, _MM_HINT_T1);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}

}  // namespace modulm

#endif
