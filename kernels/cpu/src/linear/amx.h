// The inner product kernel on tile registers (AMX): 16 rows x 16 columns x 32 k per instruction.
//
// A tile of `a` is 16 rows of 32 k in place; one of `b` is 16 pairs of 16 columns, as packed. One
// row can be computed with vectors instead, with the same bits (few.h).
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

// Registers: 0-3 sums, 4-5 a, 6-7 b. Sums 0, 1 and a 4 have `first` rows, the others `second`;
// a row of a has `depth` bytes.
inline void configure(int first, int second, int depth = 64) {
  TileConfig config;
  for (int t : {0, 1, 2, 3, 6, 7}) config.bytes[t] = 64;
  for (int t : {4, 5}) config.bytes[t] = uint16_t(depth);
  for (int t : {0, 1, 4}) config.rows[t] = uint8_t(first);
  for (int t : {2, 3, 5}) config.rows[t] = uint8_t(second);
  for (int t : {6, 7}) config.rows[t] = uint8_t(depth / 4);
  _tile_loadconfig(&config);
}

// The row counts for which this thread's tiles are configured. `release` frees the tiles, so that
// the core and the scheduler need not save 8 KB of state.
struct Tiles {
  int first = 0, second = 0, depth = 0;
  void shape(int rows, int bytes = 64) {
    int a = rows < 16 ? rows : 16, b = rows > 16 ? rows - 16 : a;
    if (a == first && b == second && bytes == depth) return;
    configure(first = a, second = b, depth = bytes);
  }
  void release() {
    if (first) _tile_release();
    first = second = depth = 0;
  }
};
inline thread_local Tiles tiles;

// A tile store takes a thousand cycles more if no vector multiplied for two thousand cycles
// (measured on a Granite Rapids): a multiplication per step of tiles keeps that unit active.
class Awake {
 public:
  void stay() {
    x_ = _mm512_fmadd_ps(x_, x_, x_);
    __asm__ volatile("" : "+v"(x_));
  }

 private:
  __m512 x_ = _mm512_setzero_ps();
};

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
  Awake awake;
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
    awake.stay();
  }
  _tile_stored(0, sums, stride);
  _tile_stored(1, sums + 16, stride);
  _tile_stored(2, sums + 32, stride);
  _tile_stored(3, sums + 48, stride);
}

// 17 to 32 rows, 32 columns. `fetch`: memory to prefetch, 2 KB per step, or null.
inline void amx_square(const bf16* a, int64_t lda, const uint32_t* b, int64_t ldb, int64_t pairs,
                       float* sums, const char* fetch) {
  constexpr int stride = kPanel * 4;
  float* below = sums + 16 * kPanel;
  _tile_loadd(0, sums, stride);
  _tile_loadd(1, sums + 16, stride);
  _tile_loadd(2, below, stride);
  _tile_loadd(3, below + 16, stride);
  Awake awake;
  for (int64_t k = 0; k < pairs; k += 16, b += 16 * ldb) {
    _tile_loadd(6, b, ldb * 4);
    _tile_loadd(4, a + 2 * k, lda * 2);
    _tile_dpbf16ps(0, 4, 6);
    if (fetch) prefetch_lines(fetch, 16);
    _tile_loadd(7, b + 16, ldb * 4);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + 16 * lda + 2 * k, lda * 2);
    if (fetch) prefetch_lines(fetch + 1024, 16), fetch += 2048;
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    awake.stay();
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
  Awake awake;
  for (int64_t k = 0; k < pairs; k += 16, b += 16 * ldb) {
    _tile_loadd(6, b, ldb * 4);
    _tile_loadd(4, a + 2 * k, lda * 2);
    _tile_dpbf16ps(0, 4, 6);
    if (two) {
      _tile_loadd(5, a + 16 * lda + 2 * k, lda * 2);
      _tile_dpbf16ps(2, 5, 6);
    }
    awake.stay();
  }
  _tile_stored(0, sums, stride);
  if (two) _tile_stored(2, below, stride);
}

inline void amx_multiply(int rows, const bf16* a, int64_t lda, const uint32_t* b, int width,
                         int64_t ldb, int64_t pairs, float* sums, bool stream) {
  tiles.shape(rows);
  if (rows <= 16 && width == kPanel) return amx_row(a, lda, b, ldb, pairs, sums, stream);
  const int64_t chunk = stream && rows > 16 ? 32 : pairs;
  for (int64_t k = 0; k < pairs; k += chunk, a += 2 * chunk, b += chunk * ldb) {
    int64_t some = pairs - k < chunk ? pairs - k : chunk;
    int c = 0;
    if (rows > 16)
      for (; c + 32 <= width; c += 32) {
        // The memory after this chunk is prefetched evenly over both halves of the chunk.
        auto next = reinterpret_cast<const char*>(b + some * ldb) + c / 32 * (some / 16) * 2048;
        amx_square(a, lda, b + c, ldb, some, sums + c, stream ? next : nullptr);
      }
    for (; c < width; c += 16) amx_column(rows, a, lda, b + c, ldb, some, sums + c);
  }
}

// Signed bytes of a times bytes of b, `count` tiles of `depth` k deep.
struct QuadTiles {
  const int8_t* a;    // 16 rows of 64 bytes
  int64_t next_k;     // bytes to the same rows 64 k later
  int64_t next_rows;  // bytes to the next 16 rows
  const uint32_t* b;  // [k / 4][ldb]
  int64_t ldb;
  int depth;
  int64_t count;
  bool stream;  // b is read from memory sequentially: prefetch it
};

// The registers of the instruction must be literals.
#define MODULM_QUAD_PRODUCT(sum, a, b)   \
  if constexpr (Signed) {                \
    _tile_dpbssd(sum, a, b);             \
  } else {                               \
    _tile_dpbsud(sum, a, b);             \
  }

// Up to 16 rows, 64 columns.
template <bool Signed>
inline void amx_quad_row(const QuadTiles& q, int32_t* dots) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const uint32_t* b = q.b;
  Awake awake;
  for (int64_t i = 0; i < q.count; i++, b += q.depth / 4 * q.ldb) {
    const char* next = reinterpret_cast<const char*>(b) + 8192;
    if (q.stream) prefetch_lines(next, 32);
    _tile_loadd(4, q.a + i * q.next_k, 64);
    _tile_loadd(6, b, q.ldb * 4);
    MODULM_QUAD_PRODUCT(0, 4, 6)
    _tile_loadd(7, b + 16, q.ldb * 4);
    MODULM_QUAD_PRODUCT(1, 4, 7)
    if (q.stream) prefetch_lines(next + 2048, 32);
    _tile_loadd(6, b + 32, q.ldb * 4);
    MODULM_QUAD_PRODUCT(2, 4, 6)
    _tile_loadd(7, b + 48, q.ldb * 4);
    MODULM_QUAD_PRODUCT(3, 4, 7)
    awake.stay();
  }
  _tile_stored(0, dots, 256);
  _tile_stored(1, dots + 16, 256);
  _tile_stored(2, dots + 32, 256);
  _tile_stored(3, dots + 48, 256);
}

// 17 to 32 rows, 32 columns.
template <bool Signed>
inline void amx_quad_square(const QuadTiles& q, int32_t* dots) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const uint32_t* b = q.b;
  Awake awake;
  for (int64_t i = 0; i < q.count; i++, b += q.depth / 4 * q.ldb) {
    const int8_t* a = q.a + i * q.next_k;
    if (q.stream) prefetch_lines(reinterpret_cast<const char*>(b) + 8192, 64);
    _tile_loadd(6, b, q.ldb * 4);
    _tile_loadd(4, a, 64);
    MODULM_QUAD_PRODUCT(0, 4, 6)
    _tile_loadd(7, b + 16, q.ldb * 4);
    MODULM_QUAD_PRODUCT(1, 4, 7)
    _tile_loadd(5, a + q.next_rows, 64);
    MODULM_QUAD_PRODUCT(2, 5, 6)
    MODULM_QUAD_PRODUCT(3, 5, 7)
    awake.stay();
  }
  _tile_stored(0, dots, 128);
  _tile_stored(1, dots + 16, 128);
  _tile_stored(2, dots + 16 * 32, 128);
  _tile_stored(3, dots + 16 * 32 + 16, 128);
}

// Any rows, 16 columns.
template <bool Signed>
inline void amx_quad_column(const QuadTiles& q, bool two, int32_t* dots) {
  _tile_zero(0);
  _tile_zero(2);
  const uint32_t* b = q.b;
  Awake awake;
  for (int64_t i = 0; i < q.count; i++, b += q.depth / 4 * q.ldb) {
    const int8_t* a = q.a + i * q.next_k;
    _tile_loadd(6, b, q.ldb * 4);
    _tile_loadd(4, a, 64);
    MODULM_QUAD_PRODUCT(0, 4, 6)
    if (two) {
      _tile_loadd(5, a + q.next_rows, 64);
      MODULM_QUAD_PRODUCT(2, 5, 6)
    }
    awake.stay();
  }
  _tile_stored(0, dots, 64);
  if (two) _tile_stored(2, dots + 16 * 16, 64);
}

#undef MODULM_QUAD_PRODUCT

// dots[rows][Vectors * 16] = the products: 4 vectors with up to 16 rows, 2 with more, 1 with any.
template <int Vectors, bool Signed>
inline void amx_quads(const QuadTiles& q, int rows, int32_t* dots) {
  if constexpr (Vectors == 4) amx_quad_row<Signed>(q, dots);
  else if constexpr (Vectors == 2) amx_quad_square<Signed>(q, dots);
  else amx_quad_column<Signed>(q, rows > 16, dots);
}

}  // namespace modulm
