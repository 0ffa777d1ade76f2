// Products of many rows in two planes of bytes with a chunk of keys or values, whose sums are joined in
// registers: the sums of the upper plane are shifted, and those of the lower one added to them. For
// levels with products of bytes.
#pragma once

#include "attention/math.h"

namespace modulm {

#if defined(__AVX512VNNI__) && !defined(__AMX_BF16__)
constexpr bool kPlanesJoined = true;
#else
constexpr bool kPlanesJoined = false;
#endif

struct FixedKeys {
  const uint32_t* const* pieces;  // keys of 32 tokens each
  int64_t lines, stride;
  const float* scales;
  int columns;  // a multiple of 32
};
struct FixedRows {
  const FixedElement* queries;
  int64_t stride;  // of a plane
  const FixedQuery* fixed;
  float* scores;
  int64_t score_stride;
  float* peaks;  // [rows][lanes]: of all columns
};
struct FixedValues {
  const uint32_t* const* pieces;  // values of 32 tokens each
  int runs;
  int64_t stride, last;  // lines of the last run
  int columns;  // a multiple of 16
};
struct FixedWeights {
  const FixedWeight* weights;
  int64_t stride;  // of a plane
  const float* units;
  float* values;
  int64_t value_stride;
  bool fresh;
};

#if defined(__AVX512VNNI__)
// Sums of the upper plane become those of both.
template <int Rows, int Vectors>
inline void shift_sums(vf (&c)[Rows][Vectors], int bits) {
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) c[r][v] = (vf)((vu)c[r][v] << bits);
}

template <int Rows, int Vectors>
[[gnu::noinline]] void key_tile(const FixedKeys& d, const FixedRows& at, int column) {
  vf c[Rows][Vectors] = {};
  const FixedElement* row[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) row[r] = at.queries + 2 * r * at.stride;
  // A loop of a length that compilers do not know: else they keep sums in memory.
  int planes = 2;
  __asm__("" : "+r"(planes));
  for (int plane = 0; plane < planes; plane++) {
    if (plane) {
      shift_sums(c, kQueryBits);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++) row[r] += at.stride;
    }
    const uint32_t* first = d.pieces[column / kPiece];
    const uint32_t* second = Vectors > 2 ? d.pieces[column / kPiece + 1] : nullptr;
    for (int64_t k = 0; k < d.lines; k++, first += d.stride, second += d.stride) {
      vu line[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++)
        line[v] = load_raw<vu>((v < 2 ? first : second) + v % 2 * kLanes);
      add_line(row, k, line, c);
    }
  }
  const float* scales = d.scales + column;
  float *to = at.scores + column, *peaks = at.peaks;
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++, to += at.score_stride, peaks += kLanes) {
    vf most = column ? loose(peaks) : splat(-__builtin_inff());
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) {
      const vf x = fixed_scores((vi)c[r][v], at.fixed[r], loose(scales + v * kLanes));
      loose(to + v * kLanes) = x;
      most = vmax(x, most);
    }
    loose(peaks) = most;
  }
}

template <int Rows, int Vectors>
[[gnu::noinline]] void value_tile(const FixedValues& d, const FixedWeights& at, int column) {
  vf c[Rows][Vectors] = {};
  const FixedWeight* row[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) row[r] = at.weights + 2 * r * at.stride;
  // The runs of both planes in one loop: else compilers keep sums in memory.
  const uint32_t* const* pieces = d.pieces;
  for (int run = 0; run < 2 * d.runs; run++, pieces++) {
    if (run == d.runs) {
      shift_sums(c, kWeightBits);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++) row[r] += at.stride - d.runs * kPiece;
      pieces = d.pieces;
    }
    const uint32_t* piece = *pieces + column;
    const int64_t count = pieces + 1 < d.pieces + d.runs ? kPiece / 4 : d.last;
    for (int64_t k = 0; k < count; k++, piece += d.stride) {
      vu line[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) line[v] = load_raw<vu>(piece + v * kLanes);
      add_line(row, k, line, c);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) row[r] += kPiece;
  }
  float* to = at.values + column;
  opaque(to);
  if (at.fresh) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) c[r][v] = fixed_values((vi)c[r][v], at.units[r], vf{});
  } else {
    const float* from = to;
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++, from += at.value_stride)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++)
        c[r][v] = fixed_values((vi)c[r][v], at.units[r], loose(from + v * kLanes));
  }
  opaque(to);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++, to += at.value_stride)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) loose(to + v * kLanes) = c[r][v];
}

// f(std::integral_constant of `rows`), from 1 to 6.
template <class F>
inline void with_rows(int rows, F&& f) {
  switch (rows) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    default: return f(std::integral_constant<int, 6>{});
  }
}

// Scores of up to kPairRows rows.
inline void add_keys(const FixedKeys& d, const FixedRows& at, int rows) {
  with_rows(rows, [&](auto count) {
    int c = 0;
    for (; c + 2 * kPiece <= d.columns; c += 2 * kPiece) key_tile<count, 4>(d, at, c);
    if (c < d.columns) key_tile<count, 2>(d, at, c);
  });
}

template <int Vectors>
inline void value_rows(const FixedValues& d, FixedWeights at, int rows, int column) {
  for (; rows > 0; rows -= kPairRows) {
    with_rows(rows, [&](auto count) { value_tile<count, Vectors>(d, at, column); });
    at.weights += 2 * kPairRows * at.stride, at.units += kPairRows;
    at.values += kPairRows * at.value_stride;
  }
}

inline void add_fixed_values(const FixedValues& d, const FixedWeights& at, int rows) {
  int c = 0;
  for (; c + 4 * kLanes <= d.columns; c += 4 * kLanes) value_rows<4>(d, at, rows, c);
  for (; c + 2 * kLanes <= d.columns; c += 2 * kLanes) value_rows<2>(d, at, rows, c);
  for (; c < d.columns; c += kLanes) value_rows<1>(d, at, rows, c);
}
#else
inline void add_keys(const FixedKeys&, const FixedRows&, int) {}
inline void add_fixed_values(const FixedValues&, const FixedWeights&, int) {}
#endif

}  // namespace modulm
