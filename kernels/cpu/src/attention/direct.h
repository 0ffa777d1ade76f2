// Products of many queries and a whole chunk of keys that become weights in registers: scores are not
// stored. For levels with products of pairs.
#pragma once

#include "attention/softmax.h"
#include "attention/tile.h"

namespace modulm {

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr bool kDirect = true;
#else
constexpr bool kDirect = false;
#endif

// Half a chunk: 64 columns in four vectors, from pieces of 32 tokens.
struct Direct {
  const uint32_t* first;   // keys of 32 tokens, lines `stride` lanes apart
  const uint32_t* second;  // of the next 32
  int64_t lines, stride;
  float unit;      // of a score, and the peaks of rows are subtracted: as in row_weights
  bool continues;  // sums of the first half are added to
};

// What rows have beside their queries. Sums: [row][even, odd][lanes], of weights in one chunk.
struct DirectRows {
  const bf16* queries;
  int64_t stride;
  const float* peaks;
  bf16* weights;
  int64_t weight_stride;
  float* sums;
};

#if defined(__AVX512BF16__)
template <int Rows>
[[gnu::noinline]] void direct_tile(const Direct& d, const DirectRows& at) {
  vf c[Rows][4] = {};
  const bf16* row[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) row[r] = at.queries + r * at.stride;
  const uint32_t *first = d.first, *second = d.second;
  for (int64_t k = 0; k < d.lines; k++, first += d.stride, second += d.stride) {
    const vu line[4] = {load_raw<vu>(first), load_raw<vu>(first + kLanes), load_raw<vu>(second),
                        load_raw<vu>(second + kLanes)};
    add_line(row, k, line, c);
  }
  const float* peaks = at.peaks;
  float* sums = at.sums;
  bf16* to = at.weights;
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++, sums += 2 * kLanes, to += at.weight_stride) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) c[r][v] = vexp2<true>(c[r][v] * d.unit - peaks[r]);
    vf even = c[r][0], odd = c[r][1];
    if (d.continues) even = loose(sums) + even, odd = loose(sums + kLanes) + odd;
    loose(sums) = even + c[r][2];
    loose(sums + kLanes) = odd + c[r][3];
    store_two(to, c[r][0], c[r][1]);
    store_two(to + kTwo, c[r][2], c[r][3]);
  }
}

inline void direct_tiles(const Direct& d, DirectRows at, int rows) {
  for (; rows > 0; rows -= kPairRows) {
    switch (rows) {
      case 1: direct_tile<1>(d, at); break;
      case 2: direct_tile<2>(d, at); break;
      case 3: direct_tile<3>(d, at); break;
      case 4: direct_tile<4>(d, at); break;
      case 5: direct_tile<5>(d, at); break;
      default: direct_tile<6>(d, at);
    }
    at.queries += kPairRows * at.stride;
    at.peaks += kPairRows;
    at.weights += kPairRows * at.weight_stride;
    at.sums += kPairRows * 2 * kLanes;
  }
}
#else
inline void direct_tiles(const Direct&, const DirectRows&, int) {}
#endif

}  // namespace modulm
