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

#include "attention/ahead.h"
#include "base/pairs.h"

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
  int64_t last = lines;  // of the last run that may differ from zero in `a`
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

// What is fetched while columns are multiplied: with each of their lines as much from `at` on, in
// steps of `stride` lanes. Null: nothing.
struct Lines {
  const uint32_t* at;
  int64_t stride;
};
struct Nothing {};
#if defined(MODULM_WIDE_PAIRS)
constexpr bool kFetchedInTiles = true;
#else
constexpr bool kFetchedInTiles = false;
#endif

// Hides where a pointer comes from: else compilers keep the address of each sum from its load to its
// store, in place of sums.
template <class T>
inline void opaque(T*& pointer) {
  __asm__("" : "+r"(pointer));
}

// A vector of sums in memory. With a copy of bytes, as in `load`, compilers move sums through the stack.
typedef float LooseVector __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
inline LooseVector& loose(float* p) { return *reinterpret_cast<LooseVector*>(p); }
inline const LooseVector& loose(const float* p) { return *reinterpret_cast<const LooseVector*>(p); }

template <int Rows, int Vectors, class Element, class Start, class Next>
[[gnu::noinline]] void tile(const Element* a, int64_t lda, const Start& start, int column,
                            const Depth& depth, const Sums& to,
                            [[maybe_unused]] const Next& ahead) {
  constexpr int width = 4 / sizeof(Element);  // elements of a line
  using Vector = typename std::conditional<width == 1, vf, vu>::type;
  vf c[Rows][Vectors];
  if (to.fresh) {
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) c[r][v] = vf{};
  } else {
    const float* from = to.data + column;
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++, from += to.stride)
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) c[r][v] = loose(from + v * kLanes);
  }
  const Element* row[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++) row[r] = a + r * lda;
  for (int run = 0; run < depth.runs; run++) {
    decltype(start(0, 0)) b[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) b[v] = start(run, column + v * kLanes);
    const int64_t count = run + 1 < depth.runs ? depth.lines : depth.last;
    auto lines = [&](auto&& fetch) {
      for (int64_t k = 0, at = 0; k < count; k++, at += depth.stride) {
        Vector line[Vectors];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) line[v] = load_raw<Vector>(b[v] + at);
        fetch();
        add_line(row, k, line, c);
      }
    };
    if constexpr (std::is_same<Next, InTurn>::value) {
      Cursor next = ahead.cursor;
      if (next.more()) lines([&] { next.fetch<Vectors>(); });
      else lines([] {});
      ahead.cursor = next;
    } else {
      lines([] {});
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) row[r] += depth.lines * width;
  }
  float* into = to.data + column;
  opaque(into);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++, into += to.stride)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) loose(into + v * kLanes) = c[r][v];
}

// Calls tile<n> for blocks of up to Rows rows. The first block fetches.
template <int Rows, int Vectors, class Element, class Start, class Next>
inline void tile_rows(Left<Element> a, const Start& start, int column, Depth depth, Sums to,
                      const Next& ahead) {
  if (a.rows >= Rows) {
    tile<Rows, Vectors>(a.data, a.stride, start, column, depth, to, ahead);
    for (int r = Rows; r + Rows <= a.rows; r += Rows)
      tile<Rows, Vectors>(a.data + r * a.stride, a.stride, start, column, depth,
                          Sums{to.data + r * to.stride, to.stride, to.fresh}, Nothing{});
  }
  if constexpr (Rows > 1) {
    const int done = a.rows / Rows * Rows;
    if (done == a.rows) return;
    const Left<Element> rest{a.data + done * a.stride, a.stride, a.rows - done};
    const Sums below{to.data + done * to.stride, to.stride, to.fresh};
    if (done) tile_rows<Rows - 1, Vectors>(rest, start, column, depth, below, Nothing{});
    else tile_rows<Rows - 1, Vectors>(rest, start, column, depth, below, ahead);
  }
}

#if defined(MODULM_WIDE_PAIRS)
constexpr int64_t kConvertedDepth = 640;  // k of rows that are converted to fp32

// The addresses of one run of a tile, and of what is fetched meanwhile, if anything.
template <int Vectors, class Start, class Next>
struct RunOf {
  static constexpr bool kFetches = !std::is_same<Next, Nothing>::value;
  const uint32_t* at[Vectors];
  Lines next{};

  RunOf(const Start& start, const Next& ahead, Depth depth, int run, int column) {
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) at[v] = start(run, column + v * kLanes);
    if constexpr (kFetches) {
      next = ahead(run, column, Vectors * kLanes);
      if (!next.at) next = {at[0], depth.stride};
    }
  }
  vu line(int v) const { return load_raw<vu>(at[v]); }
  // Line by line: all at once, prefetches would wait for each other, and products for them.
  void fetch() const {
    if constexpr (kFetches)
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v += 2) __builtin_prefetch(next.at + v * kLanes, 0, 2);
  }
  void advance(int64_t lanes) {
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) at[v] += lanes;
    if constexpr (kFetches) next.at += next.stride;
  }
};

// Rows in fp32 times pairs in bf16: one half of a line at a time, and a number, which a load
// broadcasts. Up to 12 sums.
template <int Rows, int Vectors, class Start, class Next>
inline void halves_tile(const float* a, const Start& start, int column, Depth depth, Sums to,
                        const Next& ahead) {
  vf c[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++)
      c[r][v] = to.fresh ? vf{} : load(to.data + r * to.stride + column + v * kLanes);
  for (int run = 0; run < depth.runs; run++) {
    RunOf<Vectors, Start, Next> b(start, ahead, depth, run, column);
    for (int64_t k = 0; k < depth.lines; k++, a += 2, b.advance(depth.stride)) {
      b.fetch();
      vf half[Vectors];
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) half[v] = low_half(b.line(v));
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) c[r][v] += half[v] * a[r * kConvertedDepth];
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) half[v] = high_half(b.line(v));
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) c[r][v] += half[v] * a[r * kConvertedDepth + 1];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++)
      store(to.data + r * to.stride + column + v * kLanes, c[r][v]);
}

template <int Rows, class Start, class Next>
inline void halves_rows(Left<bf16> a, const Start& start, int columns, Depth depth, Sums to,
                        const Next& ahead) {
  alignas(64) float wide[Rows * kConvertedDepth];
  for (int r = 0; r < Rows; r++)
    for (int64_t k = 0; k < depth.runs * depth.lines * 2; k += kLanes)
      store(wide + r * kConvertedDepth + k, load(a.data + r * a.stride + k));
  int c = 0;
  if constexpr (Rows <= 2)
    for (; c + 4 * kLanes <= columns; c += 4 * kLanes)
      halves_tile<Rows, 4>(wide, start, c, depth, to, ahead);
  for (; c < columns; c += 2 * kLanes) halves_tile<Rows, 2>(wide, start, c, depth, to, ahead);
}

// f(std::integral_constant of the rows, `a` from there on, `to`, whether they are the first) for
// blocks of up to six rows.
template <class Element, class F>
inline void rows_of_tiles(Left<Element> a, Sums to, F&& f) {
  for (bool first = true; a.rows > 0; first = false) {
    switch (a.rows) {
      case 1: f(std::integral_constant<int, 1>{}, a, to, first); break;
      case 2: f(std::integral_constant<int, 2>{}, a, to, first); break;
      case 3: f(std::integral_constant<int, 3>{}, a, to, first); break;
      case 4: f(std::integral_constant<int, 4>{}, a, to, first); break;
      case 5: f(std::integral_constant<int, 5>{}, a, to, first); break;
      default: f(std::integral_constant<int, 6>{}, a, to, first);
    }
    a.rows -= 6, a.data += 6 * a.stride, to.data += 6 * to.stride;
  }
}

template <class Start, class Next>
inline void halves_tiles(Left<bf16> all, const Start& start, int columns, Depth depth, Sums sums,
                         const Next& ahead) {
  rows_of_tiles(all, sums, [&](auto rows, Left<bf16> a, Sums to, bool first) {
    if (first) halves_rows<rows>(a, start, columns, depth, to, ahead);
    else halves_rows<rows>(a, start, columns, depth, to, Nothing{});
  });
}
#endif

#if defined(MODULM_WIDE_PAIRS)
// The first and third bytes of lanes as pairs, or the second and fourth.
template <bool Signed>
inline __m256i wide_bytes(vu line, bool odd) {
  const auto x = (__m256i)line;
  if (Signed) return _mm256_srai_epi16(odd ? x : _mm256_slli_epi16(x, 8), 8);
  return odd ? _mm256_srli_epi16(x, 8) : _mm256_and_si256(x, _mm256_set1_epi16(0xff));
}

// Rows of 16 bits in the order of wide_bytes times bytes, summed in int32. Rows of int16 meet columns
// of uint8, and rows of uint16 below 2^15 columns of int8.
template <int Rows, int Vectors, class Element, class Start, class Next>
[[gnu::noinline]] void bytes_tile(const Element* a, int64_t lda, const Start& start, int column,
                                  Depth depth, Sums to, const Next& ahead) {
  constexpr bool has_sign = std::is_same<Element, uint16_t>::value;
  vi c[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++)
      c[r][v] = to.fresh ? vi{} : load_raw<vi>(to.data + r * to.stride + column + v * kLanes);
  for (int run = 0; run < depth.runs; run++) {
    RunOf<Vectors, Start, Next> b(start, ahead, depth, run, column);
    for (int64_t k = 0; k < depth.lines; k++, a += 4, b.advance(depth.stride)) {
      b.fetch();
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; odd++) {
        __m256i bytes[Vectors];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++)
          bytes[v] = wide_bytes<has_sign>(b.line(v), odd);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
          for (int v = 0; v < Vectors; v += 2)
            add_pairs(c[r][v], c[r][v + 1], bytes[v], bytes[v + 1], a + r * lda + 2 * odd);
        __asm__ volatile("" ::: "memory");  // all registers are in use: a line is read twice
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++)
      store_raw(to.data + r * to.stride + column + v * kLanes, c[r][v]);
}

template <int Rows, class Element, class Start, class Next>
inline void bytes_rows(Left<Element> a, const Start& start, int columns, Depth depth, Sums to,
                       const Next& ahead) {
  int c = 0;
  if constexpr (Rows <= 2)
    for (; c + 4 * kLanes <= columns; c += 4 * kLanes)
      bytes_tile<Rows, 4>(a.data, a.stride, start, c, depth, to, ahead);
  for (; c < columns; c += 2 * kLanes)
    bytes_tile<Rows, 2>(a.data, a.stride, start, c, depth, to, ahead);
}

template <class Element, class Start, class Next>
inline void bytes_tiles(Left<Element> all, const Start& start, int columns, Depth depth, Sums sums,
                        const Next& ahead) {
  rows_of_tiles(all, sums, [&](auto rows, Left<Element> a, Sums to, bool first) {
    if (first) bytes_rows<rows>(a, start, columns, depth, to, ahead);
    else bytes_rows<rows>(a, start, columns, depth, to, Nothing{});
  });
}
#endif

template <class Element, class Start, class Next>
inline void multiply_tiles(Left<Element> a, const Start& start, int columns, Depth depth, Sums to,
                           const Next& ahead) {
  constexpr int rows = std::is_same<Element, float>::value ? kFloatRows : kPairRows;
  constexpr int wide = 4 * kLanes;
  int c = 0;
#if defined(__AVX512F__)
  // The last vector of 80 columns is computed with the four before it: alone it has too few sums to
  // keep the multipliers busy.
  const int last = columns > wide && columns % wide == kLanes ? wide + kLanes : 0;
  if (sizeof(Element) < 4 && a.rows <= 2)
    for (; c + 2 * wide <= columns - last; c += 2 * wide)
      tile_rows<2, 8>(a, start, c, depth, to, ahead);
#if defined(MODULM_QUAD_DOT)
  // Four rows too: some sums are in memory, but lines are read in their order, which is worth more
  // while the cache comes from memory.
  if constexpr (sizeof(Element) < 4)
    if (a.rows == 4)
      for (; c + 2 * wide <= columns - last; c += 2 * wide)
        tile_rows<4, 8>(a, start, c, depth, to, ahead);
#endif
  for (; c + wide <= columns - last; c += wide) tile_rows<rows, 4>(a, start, c, depth, to, ahead);
  if (last) return tile_rows<std::min(rows, 5), 5>(a, start, c, depth, to, ahead);
  for (; c + 2 * kLanes <= columns; c += 2 * kLanes)
    tile_rows<rows, 2>(a, start, c, depth, to, ahead);
#else
#if defined(__AVX2__)
  if (sizeof(Element) > 2 && a.rows > 2)
    for (; c + 2 * kLanes <= columns; c += 2 * kLanes)
      tile_rows<rows, 2>(a, start, c, depth, to, ahead);
#endif
#if defined(MODULM_MANY_REGISTERS)
  for (; c + wide <= columns; c += wide) tile_rows<rows, 4>(a, start, c, depth, to, ahead);
#else
  for (; c + wide <= columns; c += wide) tile_rows<2, 4>(a, start, c, depth, to, ahead);
#endif
#endif
  for (; c < columns; c += kLanes) tile_rows<rows, 1>(a, start, c, depth, to, ahead);
}

// In fp32, the lines of a run are a multiple of 8, in bf16 of 16. With AMX, the rows of a and c are
// padded to the next multiple of 16 if there are more than 16. ahead(run, column, columns): the Lines
// that are fetched while these columns of a run are multiplied, on levels with kFetchedInTiles. On
// those with kFetchedInTurn, an InTurn.
template <class Element, class Start, class Next = Nothing>
inline void multiply_attention(Left<Element> a, const Start& start, int columns, Depth depth,
                               Sums to, [[maybe_unused]] const Next& ahead = {}) {
#if defined(__AMX_BF16__)
  if constexpr (!std::is_same<Element, float>::value)
    return amx_tiles(a.data, a.stride, a.rows, start, columns, depth.runs, depth.lines,
                     depth.stride, to.data, to.stride, to.fresh);
#endif
#if defined(MODULM_WIDE_PAIRS)
  if constexpr (std::is_integral<Element>::value)
    return bytes_tiles(a, start, columns, depth, to, ahead);
  else if constexpr (std::is_same<Element, bf16>::value)
    if (depth.runs * depth.lines * 2 <= kConvertedDepth)
      return halves_tiles(a, start, columns, depth, to, ahead);
  if constexpr (!std::is_integral<Element>::value)
#endif
    multiply_tiles(a, start, columns, depth, to, ahead);
}

// Number of lines that are multiplied for a head of this size, out of its padded lines.
template <class Math>
inline int64_t attention_lines(int64_t size, int64_t padded) {
#if defined(__AMX_BF16__)
  if constexpr (!std::is_same<typename Math::Element, float>::value) return padded;
#endif
  constexpr int64_t width = Math::width;
  return (size + width - 1) / width < padded ? (size + width - 1) / width : padded;
}

}  // namespace modulm
