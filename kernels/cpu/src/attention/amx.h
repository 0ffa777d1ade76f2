// The inner product kernel of attention on tile registers: 16 rows x 16 columns x 16 lines of k at
// a time, or 8 lines if a run has no more.
#pragma once

#include <type_traits>

#include "linear/amx.h"

namespace modulm {

// Registers are set up as in linear/amx.h: 0-3 sums, 4-5 a, 6-7 b, all with the same rows.
struct TileRun {
  const char* a;
  int64_t a_stride;  // bytes
  int runs, depth;   // depth: lines that one instruction takes
  int64_t lines, stride;  // of b
  float* c;
  int64_t c_stride;
  bool fresh;
};

// The operands of the instruction are part of its name.
#define MODULM_TILE_DOT(sum, a, b)                                                               \
  do {                                                                                           \
    if constexpr (std::is_same<Element, bf16>::value) _tile_dpbf16ps(sum, a, b);                 \
    else if constexpr (std::is_same<Element, int8_t>::value) _tile_dpbsud(sum, a, b);            \
    else _tile_dpbusd(sum, a, b);                                                                \
  } while (0)

// Up to 16 rows and `Count` times 16 columns, which share one tile of a.
template <class Element, int Count, class Start>
inline void amx_wide(const TileRun& t, const Start& start, int column) {
  float* c = t.c + column;
  const int64_t row = t.c_stride * 4, step = t.stride * 4;
  if (t.fresh) {
    _tile_zero(0);
    if constexpr (Count > 1) _tile_zero(1);
    if constexpr (Count > 2) _tile_zero(2);
    if constexpr (Count > 3) _tile_zero(3);
  } else {
    _tile_loadd(0, c, row);
    if constexpr (Count > 1) _tile_loadd(1, c + 16, row);
    if constexpr (Count > 2) _tile_loadd(2, c + 32, row);
    if constexpr (Count > 3) _tile_loadd(3, c + 48, row);
  }
  const char* a = t.a;
  for (int run = 0; run < t.runs; run++) {
    decltype(start(0, 0)) b[Count];
    for (int i = 0; i < Count; i++) b[i] = start(run, column + 16 * i);
    for (int64_t k = 0; k < t.lines; k += t.depth, a += 4 * t.depth) {
      const int64_t at = k * t.stride;
      _tile_loadd(4, a, t.a_stride);
      _tile_loadd(6, b[0] + at, step);
      MODULM_TILE_DOT(0, 4, 6);
      if constexpr (Count > 1) {
        _tile_loadd(7, b[1] + at, step);
        MODULM_TILE_DOT(1, 4, 7);
      }
      if constexpr (Count > 2) {
        _tile_loadd(6, b[2] + at, step);
        MODULM_TILE_DOT(2, 4, 6);
      }
      if constexpr (Count > 3) {
        _tile_loadd(7, b[3] + at, step);
        MODULM_TILE_DOT(3, 4, 7);
      }
    }
  }
  _tile_stored(0, c, row);
  if constexpr (Count > 1) _tile_stored(1, c + 16, row);
  if constexpr (Count > 2) _tile_stored(2, c + 32, row);
  if constexpr (Count > 3) _tile_stored(3, c + 48, row);
}

// 32 rows, 32 columns.
template <class Element, class Start>
inline void amx_two_by_two(const TileRun& t, const Start& start, int column) {
  float *c = t.c + column, *below = c + 16 * t.c_stride;
  const int64_t row = t.c_stride * 4, step = t.stride * 4;
  if (t.fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, c, row);
    _tile_loadd(1, c + 16, row);
    _tile_loadd(2, below, row);
    _tile_loadd(3, below + 16, row);
  }
  const char* a = t.a;
  for (int run = 0; run < t.runs; run++) {
    auto b = start(run, column), next = start(run, column + 16);
    for (int64_t k = 0; k < t.lines; k += t.depth, a += 4 * t.depth) {
      _tile_loadd(6, b + k * t.stride, step);
      _tile_loadd(4, a, t.a_stride);
      MODULM_TILE_DOT(0, 4, 6);
      _tile_loadd(7, next + k * t.stride, step);
      MODULM_TILE_DOT(1, 4, 7);
      _tile_loadd(5, a + 16 * t.a_stride, t.a_stride);
      MODULM_TILE_DOT(2, 5, 6);
      MODULM_TILE_DOT(3, 5, 7);
    }
  }
  _tile_stored(0, c, row);
  _tile_stored(1, c + 16, row);
  _tile_stored(2, below, row);
  _tile_stored(3, below + 16, row);
}

template <class Element, class Start>
inline void amx_tiles(const Element* a, int64_t a_stride, int rows, const Start& start, int columns,
                      int runs, int64_t lines, int64_t stride, float* c, int64_t c_stride,
                      bool fresh) {
  const int depth = lines % 16 ? 8 : 16;
  tiles.shape(rows < 16 ? rows : 16, 4 * depth);
  TileRun t{nullptr, a_stride * int64_t(sizeof(Element)), runs, depth, lines, stride, nullptr,
            c_stride, fresh};
  auto at_row = [&](int r) {
    t.a = reinterpret_cast<const char*>(a + r * a_stride);
    t.c = c + r * c_stride;
  };
  const int whole = rows / 32 * 32, even = columns / 32 * 32;
  for (int column = 0; column < even; column += 32)
    for (int r = 0; r < whole; r += 32) {
      at_row(r);
      amx_two_by_two<Element>(t, start, column);
    }
  for (int r = 0; r < rows; r += 16) {
    at_row(r);
    int column = r < whole ? even : 0;
    for (; column + 64 <= columns; column += 64) amx_wide<Element, 4>(t, start, column);
    for (; column + 32 <= columns; column += 32) amx_wide<Element, 2>(t, start, column);
    for (; column < columns; column += 16) amx_wide<Element, 1>(t, start, column);
  }
}

#undef MODULM_TILE_DOT

}  // namespace modulm
