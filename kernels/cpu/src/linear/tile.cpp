// The inner product kernels, compiled once for linear layers and experts.
//
// Loops over rows and vectors are unrolled by pragma: GCC 12 unrolls them anyway, but too late to
// keep the sums in registers, and would store all of them at every k.
#include "linear/tile.h"

namespace modulm {
namespace {

#if !defined(__AVX2__) || defined(__AVX512F__)
#if !defined(MODULM_BF16_DOT)
inline float low_of(uint32_t pair) {
  bf16 half{uint16_t(pair)};
  return load_one(&half);
}
inline float high_of(uint32_t pair) {
  bf16 half{uint16_t(pair >> 16)};
  return load_one(&half);
}
#endif

// Scaled: the sums begin at zero and are added to `sums` times the columns' scales.
template <int Rows, int Vectors, bool Scaled>
inline void tile(const bf16* a, int64_t lda, const uint32_t* b, int64_t ldb, int64_t pairs,
                 float* sums, const float* scales, bool stream, Ahead* next) {
  const int64_t distance = next ? kAgainAhead : stream_distance(kStreamAhead);
  vf c[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++)
      c[r][v] = Scaled ? vf{} : load(sums + r * kPanel + v * kLanes);
  for (int64_t k = 0; k < pairs; k++, b += ldb) {
    if (next) next->fetch();
    vu line[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) {
      line[v] = load_raw<vu>(b + v * kLanes);
      if (stream) __builtin_prefetch(b + v * kLanes + distance, 0, 2);
    }
#if defined(MODULM_BF16_DOT)
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
      uint32_t pair = load_raw<uint32_t>(a + r * lda + 2 * k);
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) c[r][v] = pair_dot(c[r][v], line[v], pair);
    }
#else
    vf low[Vectors], high[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) low[v] = low_half(line[v]), high[v] = high_half(line[v]);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
      uint32_t pair = load_raw<uint32_t>(a + r * lda + 2 * k);
      float first = low_of(pair), second = high_of(pair);
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) c[r][v] += low[v] * first;
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) c[r][v] += high[v] * second;
    }
#endif
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) {
      float* to = sums + r * kPanel + v * kLanes;
      store(to, Scaled ? fused(c[r][v], load(scales + v * kLanes), load(to)) : c[r][v]);
    }
}

template <int Vectors, bool Scaled>
inline void tile_rows(int rows, const bf16* a, int64_t lda, const uint32_t* b, int64_t ldb,
                      int64_t pairs, float* sums, const float* scales, bool stream, Ahead* next) {
  switch (rows) {
    case 1: return tile<1, Vectors, Scaled>(a, lda, b, ldb, pairs, sums, scales, stream, next);
    case 2: return tile<2, Vectors, Scaled>(a, lda, b, ldb, pairs, sums, scales, stream, next);
#if defined(MODULM_MANY_REGISTERS)
    case 3: return tile<3, Vectors, Scaled>(a, lda, b, ldb, pairs, sums, scales, stream, next);
    case 4: return tile<4, Vectors, Scaled>(a, lda, b, ldb, pairs, sums, scales, stream, next);
#endif
#if defined(MODULM_BF16_DOT)
    case 5: return tile<5, Vectors, Scaled>(a, lda, b, ldb, pairs, sums, scales, stream, next);
    case 6: return tile<6, Vectors, Scaled>(a, lda, b, ldb, pairs, sums, scales, stream, next);
#endif
#if defined(__AVX512BF16__)
    case 7: return tile<7, Vectors, Scaled>(a, lda, b, ldb, pairs, sums, scales, stream, next);
#endif
  }
}

#else
// Up to six rows with 16 registers: with three rows and more, 12 sums, two lines, one number. The
// rows are in fp32, so that their numbers are broadcast by loads, and one half of a line meets all
// of them at a time.
constexpr int kConvertedPairs = 64;  // of the rows that are converted at a time

template <int Rows, int Vectors>
inline void halves_tile(const float* a, const uint32_t* b, int64_t ldb, int64_t pairs, float* sums,
                      bool stream) {
  vf c[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) c[r][v] = load(sums + r * kPanel + v * kLanes);
  for (int64_t k = 0; k < pairs; k++, b += ldb, a += 2) {
    if (stream)
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v += 64 / (4 * kLanes))
        __builtin_prefetch(b + v * kLanes + kStreamAhead, 0, 2);
    if constexpr (Rows == 1) {
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) {
        const vu line = load_raw<vu>(b + v * kLanes);
        c[0][v] += low_half(line) * a[0];
        c[0][v] += high_half(line) * a[1];
      }
      continue;
    }
    vf half[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) half[v] = low_half(load_raw<vu>(b + v * kLanes));
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
      float first = a[r * 2 * kConvertedPairs];
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) c[r][v] += half[v] * first;
    }
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) half[v] = high_half(load_raw<vu>(b + v * kLanes));
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
      float second = a[r * 2 * kConvertedPairs + 1];
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) c[r][v] += half[v] * second;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) store(sums + r * kPanel + v * kLanes, c[r][v]);
}

template <int Rows>
inline void halves_rows(const bf16* a, int64_t lda, const uint32_t* b, int width, int64_t ldb,
                      int64_t pairs, float* sums, bool stream) {
  constexpr int vectors = Rows == 1 ? 8 : Rows == 2 ? 4 : 2;
  alignas(64) float wide[Rows * 2 * kConvertedPairs];
  for (int64_t k = 0; k < pairs; k += kConvertedPairs, b += kConvertedPairs * ldb) {
    int64_t some = pairs - k < kConvertedPairs ? pairs - k : kConvertedPairs;
    for (int r = 0; r < Rows; r++)
      for (int64_t i = 0; i < 2 * some; i += kLanes)
        store(wide + r * 2 * kConvertedPairs + i, load(a + r * lda + 2 * k + i));
    int c = 0;
    for (; c + vectors * kLanes <= width; c += vectors * kLanes)
      halves_tile<Rows, vectors>(wide, b + c, ldb, some, sums + c, stream);
    for (; c < width; c += 2 * kLanes)
      halves_tile<Rows, 2>(wide, b + c, ldb, some, sums + c, stream);
  }
}
#endif

// b: [k][width], a in fp32.
template <class T, int Rows, int Vectors>
inline void float_tile(const float* a, int64_t lda, const T* b, int64_t ldb, int64_t ks,
                       float* sums, bool stream) {
  constexpr int ahead = 4096 / int(sizeof(T));
  vf c[Rows][Vectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) c[r][v] = load(sums + r * kPanel + v * kLanes);
  for (int64_t k = 0; k < ks; k++, b += ldb) {
    vf line[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) {
      line[v] = load(b + v * kLanes);
      if (stream) __builtin_prefetch(b + v * kLanes + ahead);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) c[r][v] = fused(line[v], a[r * lda + k], c[r][v]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; v++) store(sums + r * kPanel + v * kLanes, c[r][v]);
}

template <class T, int Vectors>
inline void float_rows(int rows, const float* a, int64_t lda, const T* b, int64_t ldb, int64_t ks,
                       float* sums, bool stream) {
  switch (rows) {
    case 1: return float_tile<T, 1, Vectors>(a, lda, b, ldb, ks, sums, stream);
    case 2: return float_tile<T, 2, Vectors>(a, lda, b, ldb, ks, sums, stream);
#if defined(__AVX2__) || defined(MODULM_MANY_REGISTERS)
    case 3: return float_tile<T, 3, Vectors>(a, lda, b, ldb, ks, sums, stream);
    case 4: return float_tile<T, 4, Vectors>(a, lda, b, ldb, ks, sums, stream);
    case 5: return float_tile<T, 5, Vectors>(a, lda, b, ldb, ks, sums, stream);
    case 6: return float_tile<T, 6, Vectors>(a, lda, b, ldb, ks, sums, stream);
#endif
  }
}

template <class T>
inline void float_panel(int rows, const float* a, int64_t lda, const T* b, int width, int64_t ks,
                        float* sums, bool stream) {
  constexpr int vectors = 4, step = vectors * kLanes;
  int c = 0;
#if defined(__AVX2__) && !defined(__AVX512F__)
  if (rows > 2)  // 12 sums, as in halves_tile
    for (; c + 2 * kLanes <= width; c += 2 * kLanes)
      float_rows<T, 2>(rows, a, lda, b + c, width, ks, sums + c, stream);
#endif
  for (; c + step <= width; c += step)
    float_rows<T, vectors>(rows, a, lda, b + c, width, ks, sums + c, stream);
  for (; c < width; c += kLanes)
    float_rows<T, 1>(rows, a, lda, b + c, width, ks, sums + c, stream);
}

}  // namespace

void multiply(int rows, const bf16* a, int64_t lda, const uint32_t* b, int width, int64_t ldb,
              int64_t pairs, float* sums, bool stream, [[maybe_unused]] Ahead* next) {
#if defined(__AMX_BF16__)
  amx_multiply(rows, a, lda, b, width, ldb, pairs, sums, stream);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  switch (rows) {
    case 1: return halves_rows<1>(a, lda, b, width, ldb, pairs, sums, stream);
    case 2: return halves_rows<2>(a, lda, b, width, ldb, pairs, sums, stream);
    case 3: return halves_rows<3>(a, lda, b, width, ldb, pairs, sums, stream);
    case 4: return halves_rows<4>(a, lda, b, width, ldb, pairs, sums, stream);
    case 5: return halves_rows<5>(a, lda, b, width, ldb, pairs, sums, stream);
    case 6: return halves_rows<6>(a, lda, b, width, ldb, pairs, sums, stream);
  }
#else
  constexpr int step = kTileVectors * kLanes;
  int c = 0;
  for (; c + step <= width; c += step)
    tile_rows<kTileVectors, false>(rows, a, lda, b + c, ldb, pairs, sums + c, nullptr, stream,
                                   next);
  for (; c < width; c += kLanes)
    tile_rows<1, false>(rows, a, lda, b + c, ldb, pairs, sums + c, nullptr, stream, next);
#endif
}

#if defined(MODULM_SCALED_TILES)
void add_product(int rows, const bf16* a, int64_t lda, const uint32_t* b, int width, int64_t pairs,
                 const float* scales, float* sums) {
  constexpr int step = kTileVectors * kLanes;
  int c = 0;
  for (; c + step <= width; c += step)
    tile_rows<kTileVectors, true>(rows, a, lda, b + c, width, pairs, sums + c, scales + c, false,
                                  nullptr);
  for (; c < width; c += kLanes)
    tile_rows<1, true>(rows, a, lda, b + c, width, pairs, sums + c, scales + c, false, nullptr);
}
#endif

void multiply_floats(int rows, const float* a, int64_t lda, const float* b, int width, int64_t ks,
                     float* sums, bool stream) {
  float_panel(rows, a, lda, b, width, ks, sums, stream);
}

void multiply_floats(int rows, const float* a, int64_t lda, const fp16* b, int width, int64_t ks,
                     float* sums, bool stream) {
  float_panel(rows, a, lda, b, width, ks, sums, stream);
}

}  // namespace modulm
