// The inner product kernel of attention: c[rows][columns] (+)= a[rows][k] * b[k][columns].
//
// b consists of runs of `depth` lines; start(run, column) returns the address of that column in the
// first line of a run, so that blocks of a paged cache are multiplied in place. Columns come in
// multiples of 16, and 16 from a multiple of 16 on are contiguous. A line is a k in fp32, a pair of
// k in bf16, or four in bytes. For one (row, column) the sum runs over k in order in one fp32
// accumulator, whatever the number of rows; between calls it passes through memory, exactly. Bytes
// are summed in int32, bit for bit in the place of the floats: rows of int8 meet columns of uint8,
// and rows of uint8 columns of int8.
//
// Loops over rows and vectors are unrolled by pragma, as in linear/tile.cpp.
#pragma once

#include <algorithm>
#include <type_traits>

#include "base/vec.h"

#if defined(__AMX_BF16__)
#include "attention/amx.h"
#endif

namespace modulm {

// a: [rows][runs * depth] lines' worth of elements, c: [rows][columns]; strides in elements.
template <class Element>
struct Left {
  const Element* data;
  int64_t stride;
  int rows;
};
struct Sums {
  float* data;
  int64_t stride;
  bool fresh;  // start from zero
};
struct Depth {
  int runs;
  int64_t lines;   // of a run
  int64_t stride;  // between lines, in lanes
};

#if defined(MODULM_BF16_DOT)
constexpr int kPairRows = 6;  // times 4 vectors: 24 accumulators, 4 lines, broadcasts in place
#elif defined(MODULM_MANY_REGISTERS)
constexpr int kPairRows = 4;
#elif defined(__AVX2__)
constexpr int kPairRows = 6;  // see halves_tile
#else
constexpr int kPairRows = 2;
#endif
#if defined(__AVX2__) || defined(MODULM_MANY_REGISTERS)
constexpr int kFloatRows = 6;
#else
constexpr int kFloatRows = 2;
#endif

template <int Rows, int Vectors>
inline void add_line(const bf16* const (&a)[Rows], int64_t k, const vu (&line)[Vectors],
                     vf (&c)[Rows][Vectors]) {
#if defined(__AVX512BF16__)
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
    auto pair = (__m512bh)_mm512_set1_epi32(load_raw<int32_t>(a[r] + 2 * k));
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++)
      c[r][v] = (vf)_mm512_dpbf16_ps((__m512)c[r][v], (__m512bh)line[v], pair);
  }
#elif defined(MODULM_BF16_DOT)
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
    auto pair = bits_as<lanes_bf16>(vu{} + load_raw<uint32_t>(a[r] + 2 * k));
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++)
      c[r][v] = bits_as<vf>(
          dot_lanes(bits_as<lanes_f32>(c[r][v]), bits_as<lanes_bf16>(line[v]), pair));
  }
#else
  vf low[Vectors], high[Vectors];
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; v++) low[v] = low_half(line[v]), high[v] = high_half(line[v]);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
    float first = load_one(a[r] + 2 * k), second = load_one(a[r] + 2 * k + 1);
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) c[r][v] += low[v] * first;
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) c[r][v] += high[v] * second;
  }
#endif
}

template <int Rows, int Vectors>
inline void add_line(const float* const (&a)[Rows], int64_t k, const vf (&line)[Vectors],
                     vf (&c)[Rows][Vectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) c[r][v] += line[v] * a[r][k];
}

// Four products of bytes; `Byte` is the type of a's, b's have the other sign.
template <class Byte>
inline vi quad_dot(vi sum, vu line, int32_t quad) {
  constexpr bool is_signed = std::is_same<Byte, int8_t>::value;
#if defined(__AVX512VNNI__)
  __m512i row = _mm512_set1_epi32(quad), column = (__m512i)line;
  return (vi)(is_signed ? _mm512_dpbusd_epi32((__m512i)sum, column, row)
                        : _mm512_dpbusd_epi32((__m512i)sum, row, column));
#elif defined(__ARM_FEATURE_DOTPROD)
  const vi row = splat_int(quad);
  return is_signed ? bits_as<vi>(dot_lanes(bits_as<lanes_s32>(sum), bits_as<lanes_u8>(line),
                                           bits_as<lanes_s8>(row)))
                   : bits_as<vi>(dot_lanes(bits_as<lanes_s32>(sum), bits_as<lanes_u8>(row),
                                           bits_as<lanes_s8>(line)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  // The even and the odd bytes as numbers of 16 bits.
  const __m256i row = _mm256_set1_epi32(quad), column = (__m256i)line;
  auto even = [](__m256i x, bool has_sign) {
    return has_sign ? _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8)
                    : _mm256_and_si256(x, _mm256_set1_epi16(0xff));
  };
  auto odd = [](__m256i x, bool has_sign) {
    return has_sign ? _mm256_srai_epi16(x, 8) : _mm256_srli_epi16(x, 8);
  };
  return sum + (vi)_mm256_madd_epi16(even(column, !is_signed), even(row, is_signed)) +
         (vi)_mm256_madd_epi16(odd(column, !is_signed), odd(row, is_signed));
#else
  for (int i = 0; i < 4; i++) {
    vi column = is_signed ? (vi)(line >> (8 * i) & 0xffu) : (vi)(line << (24 - 8 * i)) >> 24;
    sum += column * int32_t(Byte(quad >> (8 * i)));
  }
  return sum;
#endif
}

template <int Rows, int Vectors, class Byte>
inline void add_line(const Byte* const (&a)[Rows], int64_t k, const vu (&line)[Vectors],
                     vf (&c)[Rows][Vectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) {
    int32_t quad = load_raw<int32_t>(a[r] + 4 * k);
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) c[r][v] = (vf)quad_dot<Byte>((vi)c[r][v], line[v], quad);
  }
}

template <int Rows, int Vectors, class Element, class Start>
inline void tile(const Element* a, int64_t lda, const Start& start, int column, Depth depth,
                 Sums to) {
  constexpr int width = 4 / sizeof(Element);  // elements of a line
  using Vector = typename std::conditional<width == 1, vf, vu>::type;
  vf c[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++)
      c[r][v] = to.fresh ? vf{} : load(to.data + r * to.stride + column + v * kLanes);
  const Element* row[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) row[r] = a + r * lda;
  for (int run = 0; run < depth.runs; run++) {
    decltype(start(0, 0)) b[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) b[v] = start(run, column + v * kLanes);
    for (int64_t k = 0, at = 0; k < depth.lines; k++, at += depth.stride) {
      Vector line[Vectors];
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) line[v] = load_raw<Vector>(b[v] + at);
      add_line(row, k, line, c);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) row[r] += depth.lines * width;
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) store(to.data + r * to.stride + column + v * kLanes, c[r][v]);
}

// Calls tile<n> for blocks of up to Rows rows.
template <int Rows, int Vectors, class Element, class Start>
inline void tile_rows(Left<Element> a, const Start& start, int column, Depth depth, Sums to) {
  int r = 0;
  for (; r + Rows <= a.rows; r += Rows, to.data += Rows * to.stride)
    tile<Rows, Vectors>(a.data + r * a.stride, a.stride, start, column, depth, to);
  if constexpr (Rows > 1) {
    if (r == a.rows) return;
    a.data += r * a.stride;
    a.rows -= r;
    tile_rows<Rows - 1, Vectors>(a, start, column, depth, to);
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int64_t kConvertedDepth = 640;  // k of rows that are converted to fp32

// Rows in fp32 times pairs in bf16, two vectors of columns: 12 sums, one half of a line at a time,
// and a number, which a load broadcasts.
template <int Rows, class Start>
inline void halves_tile(const float* a, const Start& start, int column, Depth depth, Sums to) {
  constexpr int vectors = 2;
  vf c[Rows][vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++)
      c[r][v] = to.fresh ? vf{} : load(to.data + r * to.stride + column + v * kLanes);
  for (int run = 0; run < depth.runs; run++) {
    const uint32_t *first = start(run, column), *second = start(run, column + kLanes);
    for (int64_t k = 0; k < depth.lines; k++, a += 2) {
      vf half[vectors] = {low_half(load_raw<vu>(first)), low_half(load_raw<vu>(second))};
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) c[r][v] += half[v] * a[r * kConvertedDepth];
      half[0] = high_half(load_raw<vu>(first)), half[1] = high_half(load_raw<vu>(second));
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) c[r][v] += half[v] * a[r * kConvertedDepth + 1];
      first += depth.stride, second += depth.stride;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++)
      store(to.data + r * to.stride + column + v * kLanes, c[r][v]);
}

template <int Rows, class Start>
inline void halves_rows(const bf16* a, int64_t lda, const Start& start, int columns, Depth depth,
                      Sums to) {
  alignas(64) float wide[Rows * kConvertedDepth];
  for (int r = 0; r < Rows; r++)
    for (int64_t k = 0; k < depth.runs * depth.lines * 2; k += kLanes)
      store(wide + r * kConvertedDepth + k, load(a + r * lda + k));
  for (int c = 0; c < columns; c += 2 * kLanes) halves_tile<Rows>(wide, start, c, depth, to);
}

template <class Start>
inline void halves_tiles(Left<bf16> a, const Start& start, int columns, Depth depth, Sums to) {
  for (int r = 0; r < a.rows; r += kPairRows, to.data += kPairRows * to.stride) {
    const bf16* rows = a.data + r * a.stride;
    switch (std::min(a.rows - r, kPairRows)) {
      case 1: halves_rows<1>(rows, a.stride, start, columns, depth, to); break;
      case 2: halves_rows<2>(rows, a.stride, start, columns, depth, to); break;
      case 3: halves_rows<3>(rows, a.stride, start, columns, depth, to); break;
      case 4: halves_rows<4>(rows, a.stride, start, columns, depth, to); break;
      case 5: halves_rows<5>(rows, a.stride, start, columns, depth, to); break;
      default: halves_rows<6>(rows, a.stride, start, columns, depth, to);
    }
  }
}
#endif

template <class Element, class Start>
inline void multiply_tiles(Left<Element> a, const Start& start, int columns, Depth depth, Sums to) {
  constexpr int rows = std::is_same<Element, float>::value ? kFloatRows : kPairRows;
  constexpr int wide = 4 * kLanes;
  int c = 0;
#if defined(__AVX512F__)
  // The last vector of 80 columns is computed with the four before it: alone it has too few sums to
  // keep the multipliers busy.
  const int last = columns > wide && columns % wide == kLanes ? wide + kLanes : 0;
  for (; c + wide <= columns - last; c += wide) tile_rows<rows, 4>(a, start, c, depth, to);
  if (last) return tile_rows<std::min(rows, 5), 5>(a, start, c, depth, to);
  for (; c + 2 * kLanes <= columns; c += 2 * kLanes) tile_rows<rows, 2>(a, start, c, depth, to);
#else
#if defined(__AVX2__)
  if constexpr (std::is_same<Element, bf16>::value)
    if (a.rows > 2 && depth.runs * depth.lines * 2 <= kConvertedDepth)
      return halves_tiles(a, start, columns, depth, to);
  if (sizeof(Element) > 2 && a.rows > 2)
    for (; c + 2 * kLanes <= columns; c += 2 * kLanes)
      tile_rows<rows, 2>(a, start, c, depth, to);
#endif
#if defined(MODULM_MANY_REGISTERS)
  for (; c + wide <= columns; c += wide) tile_rows<rows, 4>(a, start, c, depth, to);
#else
  for (; c + wide <= columns; c += wide) tile_rows<2, 4>(a, start, c, depth, to);
#endif
#endif
  for (; c < columns; c += kLanes) tile_rows<rows, 1>(a, start, c, depth, to);
}

// In fp32, the lines of a run are a multiple of 8, in bf16 of 16. With AMX, the rows of a and c are
// padded to the next multiple of 16 if there are more than 16.
template <class Element, class Start>
inline void multiply_attention(Left<Element> a, const Start& start, int columns, Depth depth,
                               Sums to) {
#if defined(__AMX_BF16__)
  if constexpr (!std::is_same<Element, float>::value)
    return amx_tiles(a.data, a.stride, a.rows, start, columns, depth.runs, depth.lines,
                     depth.stride, to.data, to.stride, to.fresh);
#endif
  multiply_tiles(a, start, columns, depth, to);
}

// Number of lines that are multiplied for a head of this size, out of its padded lines.
template <class Element>
inline int64_t attention_lines(int64_t size, int64_t padded) {
#if defined(__AMX_BF16__)
  if constexpr (!std::is_same<Element, float>::value) return padded;
#endif
  const int64_t width = 4 / sizeof(Element);
  return (size + width - 1) / width < padded ? (size + width - 1) / width : padded;
}

}  // namespace modulm
