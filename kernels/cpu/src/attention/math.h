// The two ways to multiply with a cache: on bf16 pairs, or in fp32.
//
// Both offer keys(...) and values(...), which give a piece of a block (a multiple of 32 tokens) as
// a right-hand side [k][columns], in place or converted into `buffer`, and product(...), which adds
// a[rows][k] * b[k][columns] to sums[rows][64].
#pragma once

#include "attention/cache.h"
#include "linear/decode.h"
#include "linear/tile.h"

namespace modulm {

template <class Line>
struct Side {
  const Line* data;
  int64_t stride;
};

struct PairMath {
  using Element = bf16;
  using Line = uint32_t;

  static Side<Line> keys(const Cache& c, int64_t id, int64_t head, int64_t at, int64_t count,
                         Line* buffer) {
    const uint8_t* from = c.keys(id, head);
    if (c.dtype == kBF16) return {reinterpret_cast<const Line*>(from) + at, c.block};
    for (int64_t d = 0; d < c.size / 2; d++)
      decode_fp8(from + (d * c.block + at) * 2, buffer + d * count, count);
    return {buffer, count};
  }

  // Of `count` tokens only the first `valid` are in use; the others are made zero, because their
  // weight is 0 but what memory holds there might be NaN.
  static Side<Line> values(const Cache& c, int64_t id, int64_t head, int64_t at, int64_t count,
                           int64_t valid, Line* buffer) {
    int64_t lanes = count / 2 * c.size;
    const uint8_t* from = c.values(id, head) + at * c.size * c.element();
    if (c.dtype == kBF16 && valid >= count) return {reinterpret_cast<const Line*>(from), c.size};
    if (c.dtype == kBF16) std::memcpy(buffer, from, lanes * sizeof(Line));
    else decode_fp8(from, buffer, lanes);
    if (valid < count) {
      int64_t whole = valid / 2;
      if (valid % 2)
        for (int64_t d = 0; d < c.size; d++) buffer[whole * c.size + d] &= 0xffffu;
      int64_t first = div_up(valid, 2) * c.size;
      std::memset(buffer + first, 0, (lanes - first) * sizeof(Line));
    }
    return {buffer, c.size};
  }

  static void product(int rows, const Element* a, int64_t lda, Side<Line> b, int width, int64_t k,
                      float* sums) {
    for (int r = 0; r < rows; r += kBlockRows)
      multiply(rows - r < kBlockRows ? rows - r : kBlockRows, a + r * lda, lda, b.data, width,
               b.stride, k / 2, sums + r * kPanel);
  }
};

template <int Rows>
inline void plain_tile(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t k,
                       float* sums) {
  constexpr int vectors = 2;
  vf c[Rows][vectors];
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < vectors; v++) c[r][v] = load(sums + r * kPanel + v * kLanes);
  for (int64_t i = 0; i < k; i++, b += ldb)
    for (int v = 0; v < vectors; v++) {
      vf line = load(b + v * kLanes);
      for (int r = 0; r < Rows; r++) c[r][v] += line * a[r * lda + i];
    }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < vectors; v++) store(sums + r * kPanel + v * kLanes, c[r][v]);
}

struct PlainMath {
  using Element = float;
  using Line = float;

  template <class E>
  static void widen_rows(const E* from, int64_t stride, int64_t rows, int64_t columns, float* to) {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < columns; c += kLanes)
        store(to + r * columns + c, load(from + r * stride + c));
  }

  static Side<Line> keys(const Cache& c, int64_t id, int64_t head, int64_t at, int64_t count,
                         Line* buffer) {
    const uint8_t* from = c.keys(id, head);
    if (c.dtype == kF32) return {reinterpret_cast<const float*>(from) + at, c.block};
    widen_rows(reinterpret_cast<const fp16*>(from) + at, c.block, c.size, count, buffer);
    return {buffer, count};
  }

  static Side<Line> values(const Cache& c, int64_t id, int64_t head, int64_t at, int64_t count,
                           int64_t valid, Line* buffer) {
    const uint8_t* from = c.values(id, head) + at * c.size * c.element();
    if (c.dtype == kF32 && valid >= count) return {reinterpret_cast<const float*>(from), c.size};
    if (c.dtype == kF32) std::memcpy(buffer, from, count * c.size * sizeof(float));
    else widen_rows(reinterpret_cast<const fp16*>(from), c.size, count, c.size, buffer);
    for (int64_t i = valid * c.size; i < count * c.size; i++) buffer[i] = 0.0f;
    return {buffer, c.size};
  }

  static void product(int rows, const Element* a, int64_t lda, Side<Line> b, int width, int64_t k,
                      float* sums) {
    for (int c = 0; c < width; c += 2 * kLanes) {
      int r = 0;
      for (; r + 4 <= rows; r += 4)
        plain_tile<4>(a + r * lda, lda, b.data + c, b.stride, k, sums + r * kPanel + c);
      for (; r < rows; r++)
        plain_tile<1>(a + r * lda, lda, b.data + c, b.stride, k, sums + r * kPanel + c);
    }
  }
};

}  // namespace modulm
