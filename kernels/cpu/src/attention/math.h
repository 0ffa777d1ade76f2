// The three ways to multiply with a cache: on bf16 pairs, in fp32, or exactly on integers.
//
// All read a piece of 32 tokens of one block as a right-hand side: keys [lines of D][32 tokens],
// values [lines of 32 tokens][Dv], in place if the cache has this layout, else converted.
#pragma once

#include "attention/fixed.h"
#include "attention/tile.h"

namespace modulm {

constexpr int kPiece = 32;  // tokens

struct PairMath {
  using Element = bf16;
  using Weight = bf16;
  static constexpr int planes = 1;
  static constexpr bool fixed = false;
  using Line = uint32_t;
  static constexpr int width = 2;  // elements of a line
  static constexpr bool coarse = true;

  static bool in_place(const Cache& c) { return c.dtype == kBF16; }

  static void keys(const Cache& c, int64_t id, int64_t head, int64_t at, Line* to) {
    const uint8_t* from = c.keys(id, head) + at * 2;
    with_code(c.dtype, [&](auto code) {
      for (int64_t d = 0; d < c.size / 2; d++)
        decode_codes(from + d * c.block * 2, to + d * kPiece, kPiece, code);
    });
    if (!c.scaled()) return;
    const float* scales = c.scales(id, head) + at;
    for (int64_t d = 0; d < c.size / 2; d++)
      for (int i = 0; i < kPiece; i += kLanes) {
        const vf scale = load(scales + i);
        scale_pairs(to + d * kPiece + i, scale, scale);
      }
  }
  // Multiplies a vector of bf16 pairs.
  static void scale_pairs(Line* pairs, vf first, vf second) {
    const vu x = load_raw<vu>(pairs);
    const vu low = __builtin_convertvector(narrow(low_half(x) * first, bf16{}), vu);
    const vu high = __builtin_convertvector(narrow(high_half(x) * second, bf16{}), vu);
    store_raw(pairs, low | high << 16);
  }
  static void values(const Cache& c, int64_t id, int64_t head, int64_t at, Line* to) {
    const uint8_t* from = c.values(id, head) + at * c.value_size;
    with_code(c.dtype, [&](auto code) {
      decode_codes(from, to, kPiece / 2 * c.value_size, code);
    });
    if (!c.scaled()) return;
    const float* scales = c.scales(id, head) + c.block + at;
    for (int64_t pair = 0; pair < kPiece / 2; pair++)
      for (int64_t d = 0; d < c.value_size; d += kLanes)
        scale_pairs(to + pair * c.value_size + d, splat(scales[2 * pair]),
                    splat(scales[2 * pair + 1]));
  }

  // Zeroes the tokens from `valid` on: their weight is 0, but the memory might contain NaN.
  static void clear_after(Line* values, int64_t valid, int64_t size) {
    if (valid % 2)
      for (int64_t d = 0; d < size; d++) values[valid / 2 * size + d] &= 0xffffu;
    int64_t first = div_up(valid, 2) * size;
    std::memset(values + first, 0, (kPiece / 2 * size - first) * sizeof(Line));
  }

  // The rows [32 tokens][size] that are interleaved in a piece of values.
  static void rows(const Line* values, int64_t size, bf16* to) {
    for (int64_t pair = 0; pair < kPiece / 2; pair++, values += size, to += 2 * size)
      for (int64_t d = 0; d < size; d += kLanes) {
        vu lines = load_raw<vu>(values + d);
        store_raw(to + d, __builtin_convertvector(lines & 0xffffu, vh));
        store_raw(to + size + d, __builtin_convertvector(lines >> 16, vh));
      }
  }
};

struct PlainMath {
  using Element = float;
  using Weight = float;
  static constexpr int planes = 1;
  static constexpr bool fixed = false;
  using Line = float;
  static constexpr int width = 1;
  static constexpr bool coarse = false;

  static bool in_place(const Cache& c) { return c.dtype == kF32; }

  static void widen_row(const uint8_t* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i += kLanes)
      store(to + i, load(reinterpret_cast<const fp16*>(from) + i));
  }
  static void keys(const Cache& c, int64_t id, int64_t head, int64_t at, Line* to) {
    for (int64_t d = 0; d < c.size; d++)
      widen_row(c.keys(id, head) + (d * c.block + at) * 2, kPiece, to + d * kPiece);
  }
  static void values(const Cache& c, int64_t id, int64_t head, int64_t at, Line* to) {
    widen_row(c.values(id, head) + at * c.value_size * 2, kPiece * c.value_size, to);
  }
  static void clear_after(Line* values, int64_t valid, int64_t size) {
    std::memset(values + valid * size, 0, (kPiece - valid) * size * sizeof(Line));
  }
  static void rows(const Line* values, int64_t size, float* to) {
    std::memcpy(to, values, kPiece * size * sizeof(float));
  }
};

// An int8 cache in place, with queries and weights in fixed point (fixed.h), whose sums are exact.
struct IntegerMath {
  using Element = FixedElement;
  using Weight = FixedWeight;
  using Line = uint32_t;
  static constexpr int width = 4, planes = kFixedPlanes;
  static constexpr bool coarse = true, fixed = true;

  static bool in_place(const Cache&) { return true; }
  // Unused tokens may contain anything: their weights are 0.
  static void clear_after(Line*, int64_t, int64_t) {}
};

}  // namespace modulm
