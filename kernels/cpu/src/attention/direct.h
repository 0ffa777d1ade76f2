// Products of many queries and a chunk of keys that become weights in registers: scores are not
// stored. For levels with products of pairs.
#pragma once

#include "attention/math.h"
#include "attention/softmax.h"

namespace modulm {

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr bool kDirect = true;
#else
constexpr bool kDirect = false;
#endif

// Half a chunk or its last quarter: 64 or 32 columns, from pieces of 32 tokens.
struct Direct {
  const uint32_t* first;   // keys of 32 tokens, lines `stride` lanes apart
  const uint32_t* second;  // of the next 32
  int64_t lines, stride;
  float unit;      // of a score, and the peaks of rows are subtracted: as in row_weights
  bool continues;  // sums of the columns before are added to
  bool peaks;      // the first 32 columns say what the peaks are
  int64_t column;  // the first one's in the chunk
};

// What rows have beside their queries. Sums: [row][even, odd][lanes], of weights in one chunk.
struct DirectRows {
  const bf16* queries;
  int64_t stride;
  float* peaks;
  const Columns* seen;  // of the split, in which the chunk begins at `origin`
  int64_t origin;
  bf16* weights;
  int64_t weight_stride;
  float* sums;
};

#if defined(__AVX512BF16__)
// Lanes of a vector of the columns from `column` on that are below `end`.
inline __mmask16 lanes_below(int64_t end, int64_t column) {
  const int64_t count = std::min<int64_t>(std::max<int64_t>(end - column, 0), kLanes);
  return __mmask16((1u << count) - 1);
}

// Cut: rows see the columns up to an end of their own, or peaks are to be found.
template <int Rows, int Vectors, bool Cut>
[[gnu::noinline]] void direct_tile(const Direct& d, const DirectRows& at) {
  vf c[Rows][Vectors] = {};
  const bf16* row[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) row[r] = at.queries + r * at.stride;
  const uint32_t *first = d.first, *second = d.second;
  for (int64_t k = 0; k < d.lines; k++, first += d.stride, second += d.stride) {
    vu line[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++)
      line[v] = load_raw<vu>((v < 2 ? first : second) + v % 2 * kLanes);
    add_line(row, k, line, c);
  }
  float* peaks = at.peaks;
  float* sums = at.sums;
  bf16* to = at.weights;
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++, sums += 2 * kLanes, to += at.weight_stride) {
    const int64_t end = Cut ? at.seen[r].last - at.origin - d.column : 0;
    auto seen = [&](int v, vf x, vf other) {
      return (vf)_mm512_mask_mov_ps((__m512)other, lanes_below(end, v * kLanes), (__m512)x);
    };
    if (Cut && d.peaks)
      peaks[r] = d.unit * largest(vmax(seen(1, c[r][1], splat(kNever)),
                                       seen(0, c[r][0], splat(kNever))));
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) {
      c[r][v] = vexp2<true>(c[r][v] * d.unit - peaks[r]);
      if constexpr (Cut) c[r][v] = seen(v, c[r][v], vf{});
    }
    vf even = c[r][0], odd = c[r][1];
    if (d.continues) even = loose(sums) + even, odd = loose(sums + kLanes) + odd;
    if constexpr (Vectors > 2) even = even + c[r][2], odd = odd + c[r][3];
    loose(sums) = even;
    loose(sums + kLanes) = odd;
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v += 2) store_two(to + v * kLanes, c[r][v], c[r][v + 1]);
  }
}

template <int Vectors, bool Cut>
inline void direct_rows(const Direct& d, DirectRows at, int rows) {
  for (; rows > 0; rows -= kPairRows) {
    switch (rows) {
      case 1: direct_tile<1, Vectors, Cut>(d, at); break;
      case 2: direct_tile<2, Vectors, Cut>(d, at); break;
      case 3: direct_tile<3, Vectors, Cut>(d, at); break;
      case 4: direct_tile<4, Vectors, Cut>(d, at); break;
      case 5: direct_tile<5, Vectors, Cut>(d, at); break;
      default: direct_tile<6, Vectors, Cut>(d, at);
    }
    at.queries += kPairRows * at.stride;
    at.peaks += kPairRows, at.seen += kPairRows;
    at.weights += kPairRows * at.weight_stride;
    at.sums += kPairRows * 2 * kLanes;
  }
}

// cut: as of a tile, of which 32 columns always are.
inline void direct_tiles(const Direct& d, const DirectRows& at, int rows, int columns, bool cut) {
  if (columns == kPiece) direct_rows<2, true>(d, at, rows);
  else if (cut) direct_rows<4, true>(d, at, rows);
  else direct_rows<4, false>(d, at, rows);
}
#else
inline void direct_tiles(const Direct&, const DirectRows&, int, int, bool) {}
#endif

}  // namespace modulm
