// Sums of one panel of codes, for linear layers and experts.
#pragma once

#include <cstring>

#include "base/pool.h"
#include "linear/blocks.h"
#include "linear/decode.h"
#include "linear/fp8.h"
#include "linear/integer.h"
#include "linear/product.h"
#include "linear/tile.h"

namespace modulm {

constexpr int64_t kChunk = 128;           // k decoded or multiplied at a time
constexpr int64_t kIntegerChunk = kStep;  // the same for integers

inline void zero(float* sums, int64_t rows) {
  std::memset(sums, 0, rows * kPanel * sizeof(float));
}

inline float* sums_of(int64_t rows, int slot) {
  auto sums = static_cast<float*>(scratch(slot, rows * kPanel * int64_t(sizeof(float))));
  zero(sums, rows);
  return sums;
}

// f(row, rows) over [0, total) in blocks of `size`.
template <class F>
inline void for_row_blocks(int64_t total, int size, F&& f) {
  for (int64_t r = 0; r < total; r += size) f(r, int(total - r < size ? total - r : size));
}

// sums += scale * the group's sums
inline void add_group(const Weight& w, int64_t panel, int64_t group, int64_t rows,
                      const float* part, float* sums) {
  int64_t first = w.scale_index(panel, group);
  for (int c = 0; c < w.width(panel); c += kLanes) {
    vf scale = load_scales(w.scales, first + c, w.scale_dtype);
    for (int64_t i = c; i < rows * kPanel; i += kPanel)
      store(sums + i, fused(load(part + i), scale, load(sums + i)));
  }
}

template <class T>
struct Rows {
  const T* data;
  int64_t stride;
};

// Rows of padded K as T.
template <class T>
inline Rows<T> rows_as(const Weight& w, Rows<bf16> x, int64_t rows) {
  if constexpr (std::is_same_v<T, bf16>) return x;
  int64_t padded = w.padded_k();
  auto wide = static_cast<T*>(scratch(kDecoded, rows * padded * int64_t(sizeof(T))));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < padded; k += kLanes)
      store(wide + r * padded + k, load(x.data + r * x.stride + k));
  return {wide, padded};
}

// Few rows: codes are decoded in registers, without a buffer.
inline void fp8_few_sums(const Weight& w, int64_t panel, Rows<bf16> narrow, int64_t rows,
                         float* sums) {
  int width = w.width(panel);
  float* part = w.grouped() ? sums_of(rows, kGroupSums) : sums;
  Rows<FP8Input> x = rows_as<FP8Input>(w, narrow, rows);
  for (int64_t group = 0; group < w.groups(); group++) {
    int64_t k = group * w.group;
    if (w.grouped()) zero(part, rows);
    multiply_fp8(rows, x.data + k, x.stride, w.panel(panel) + w.bytes(k, width), width, w.group,
                 part);
    if (w.grouped()) add_group(w, panel, group, rows, part, sums);
  }
}

// sums[rows][64] += x * the panel, with the scales of groups, if any, applied.
inline void fp8_sums(const Weight& w, int64_t panel, Rows<bf16> x, int64_t rows, float* sums) {
  if (fp8_in_registers(rows, w.width(panel))) return fp8_few_sums(w, panel, x, rows, sums);
  int width = w.width(panel);
  float* part = w.grouped() ? sums_of(rows, kGroupSums) : sums;
  auto decoded = static_cast<uint32_t*>(scratch(kDecoded, kChunk * kPanel * 2));
  const uint8_t* codes = w.panel(panel);
  for (int64_t group = 0; group < w.groups(); group++) {
    int64_t k = group * w.group, end = k + w.group;
    if (w.grouped()) zero(part, rows);
    for (; k < end; k += kChunk) {
      int64_t ks = end - k < kChunk ? end - k : kChunk;
      decode(w.format, codes + w.bytes(k, width), decoded, ks, width);
      for_row_blocks(rows, kBlockRows, [&](int64_t r, int n) {
        multiply(n, x.data + r * x.stride + k, x.stride, decoded, width, width, ks / 2,
                 part + r * kPanel);
      });
    }
    if (w.grouped()) add_group(w, panel, group, rows, part, sums);
  }
}

// The same for integers. Rows are those of `a`: digits are counted. With more than kQuadRows the
// first is a multiple of kRowTile; fewer lie in one tile.
inline void integer_sums(const Weight& w, int64_t panel, const Activations& a, int64_t row,
                         int64_t rows, float* sums) {
  if (w.blocks())
    return block_sums(w, panel, a, row, rows, scratch(kDecoded, sizeof(SpreadBlocks)), sums);
  bool nibbles = w.format == kWeightInt4;
  int width = w.width(panel);
  auto codes = reinterpret_cast<const uint32_t*>(w.panel(panel));
  int64_t last = w.runs_end();
  if (rows <= kQuadRows) {
    Slice all{w, panel, 0, last, codes, nibbles, false, true, nullptr};
    return multiply_slice(all, a, row, int(rows), sums);
  }
  bool centred = kSpreadCentred && nibbles && w.whole_zeros && !w.table;
  auto spread = static_cast<uint32_t*>(scratch(kDecoded, kIntegerChunk * kPanel));
  for (int64_t k = 0; k < last; k += kIntegerChunk) {
    int64_t end = k + kIntegerChunk < last ? k + kIntegerChunk : last;
    const int64_t tiles = div_up(rows, kIntegerRows) * (width / (2 * kLanes));
    Ahead next(codes + w.bytes(end, width) / 4, w.bytes(end - k, width), tiles * ((end - k) / 32));
    Slice slice{w,       panel, k,       end,   codes + w.bytes(k, width) / 4,
                false, centred, false, kTiled ? nullptr : &next};
    if (nibbles) {
      spread_nibbles(slice, centred, spread);
      slice.codes = spread;
    }
    for_row_blocks(rows, kIntegerRows, [&](int64_t r, int n) {
      slice.stream = kTiled && !nibbles && r == 0;
      multiply_slice(slice, a, row + r, n, sums + r * kPanel);
    });
  }
}

}  // namespace modulm
