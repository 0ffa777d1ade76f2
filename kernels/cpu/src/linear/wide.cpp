#include "linear/wide.h"

#include "base/pool.h"
#include "linear/product.h"
#include "linear/slice.h"

#if defined(__AVX2__) && !defined(__AVX512F__)

namespace modulm {
namespace {

// c[row][v] += four products of each lane of codes[v] and of the row's quad.
template <int Rows, int Vectors>
inline void wide_dot(const int8_t* x, int64_t stride, const vu (&codes)[Vectors],
                     vi (&c)[Rows][Vectors]) {
  __m256i even[Vectors], odd[Vectors];
  for (int v = 0; v < Vectors; v++) {
    even[v] = (__m256i)(codes[v] & 0x00ff00ffu);
    odd[v] = (__m256i)(codes[v] >> 8 & 0x00ff00ffu);
  }
  for (int r = 0; r < Rows; r++) {
    const int8_t* quad = x + r * stride;
    const __m256i first = _mm256_set1_epi32(load_raw<int32_t>(quad));
    for (int v = 0; v < Vectors; v++) c[r][v] += (vi)_mm256_madd_epi16(even[v], first);
    const __m256i second = _mm256_set1_epi32(load_raw<int32_t>(quad + 4));
    for (int v = 0; v < Vectors; v++) c[r][v] += (vi)_mm256_madd_epi16(odd[v], second);
  }
}

// Vectors * kLanes columns of a slice. row: counted in digits.
template <int Rows, int Vectors, Lying Kind>
inline void wide_tile(const Slice& s, const Activations& a, int64_t row, int column, float* sums) {
  constexpr int halves = Kind == kQuads ? 1 : 2, deep = 4 * halves;
  const Weight& w = s.w;
  const int64_t ldb = w.width(s.panel), length = w.run(), stride = a.blocks * 2 * kBlockK;
  const int32_t* totals = a.sums + row * a.runs + s.first_run;
  const int8_t* x = a.at(row, 0) + 2 * s.begin;
  const uint32_t* b = s.codes + column;
  Scales<Vectors> group(s, column);
  const Lookup code_of(w.table);
  for (int64_t k = s.begin; k < s.end;) {
    vf part[Rows][Vectors] = {};
    const int64_t step = k / kStep;
    for (int64_t stop = s.step_end(k), end; k < stop; totals++) {
      end = k + length < stop ? k + length : stop;
      vi c[Rows][Vectors];
      for (int r = 0; r < Rows; r++)
        for (int v = 0; v < Vectors; v++)
          c[r][v] = splat_int(-w.centre() * totals[2 * r * a.runs]);
      for (; k < end; k += deep, b += ldb, x += 2 * deep) {
        if (s.next && k % 32 == 0) s.next->fetch();
        if (s.stream)
          for (int v = 0; v < Vectors; v += 64 / (4 * kLanes)) {
            __builtin_prefetch(b + v * kLanes + kQuadsFar, 0, 2);
            __builtin_prefetch(b + v * kLanes + kQuadsNear);
          }
        for (int h = 0; h < halves; h++) {
          vu codes[Vectors];
          for (int v = 0; v < Vectors; v++)
            codes[v] = codes_of<Kind>(load_raw<vu>(b + v * kLanes), h, code_of);
          wide_dot(x + 8 * h, stride, codes, c);
        }
      }
      if (s.grouped) group.load();
      for (int r = 0; r < Rows; r++) {
        const float total = float(totals[2 * r * a.runs]);
        for (int v = 0; v < Vectors; v++)
          part[r][v] = add_run(part[r][v], c[r][v], group.scale[v], w.zeros, group.zero[v], total);
      }
    }
    for (int r = 0; r < Rows; r++)
      for (int v = 0; v < Vectors; v++) {
        float* to = sums + 2 * r * kPanel + column + v * kLanes;
        store(to, fused(part[r][v], a.scales[(row + 2 * r) * a.steps + step], load(to)));
      }
  }
}

template <int Vectors, Lying Kind>
inline void wide_rows(int rows, const Slice& s, const Activations& a, int64_t row, int column,
                      float* sums) {
  switch (rows) {
    case 1: return wide_tile<1, Vectors, Kind>(s, a, row, column, sums);
    case 2: return wide_tile<2, Vectors, Kind>(s, a, row, column, sums);
    case 3: return wide_tile<3, Vectors, Kind>(s, a, row, column, sums);
    case 4: return wide_tile<4, Vectors, Kind>(s, a, row, column, sums);
  }
}

template <Lying Kind>
inline void wide_slice(int rows, const Slice& s, const Activations& a, int64_t row, float* sums) {
  const int width = s.w.width(s.panel);
  if (rows == 1 && width == kPanel)
    return wide_tile<1, kPanel / kLanes, Kind>(s, a, row, 0, sums);
  for (int c = 0; c < width; c += 2 * kLanes) wide_rows<2, Kind>(rows, s, a, row, c, sums);
}

inline void multiply_wide(int rows, const Slice& s, const Activations& a, int64_t row,
                          float* sums) {
  if (s.nibbles && s.w.table) return wide_slice<kLookedUp>(rows, s, a, row, sums);
  if (s.nibbles) return wide_slice<kNibbles>(rows, s, a, row, sums);
  wide_slice<kQuads>(rows, s, a, row, sums);
}

}  // namespace

void wide_sums(const Weight& w, int64_t panel, const Activations& a, int64_t row, int64_t digits,
               float* sums) {
  const bool nibbles = w.format == kWeightInt4;
  const int width = w.width(panel);
  const auto codes = reinterpret_cast<const uint32_t*>(w.panel(panel));
  const int64_t last = w.runs_end(), rows = digits / 2;
  if (rows == 1) return multiply_wide(1, {w, panel, 0, last, codes, nibbles, false, true, nullptr},
                                      a, row, sums);
  auto room = static_cast<uint32_t*>(scratch(kDecoded, kStep * kPanel));
  for (int64_t k = 0; k < last; k += kStep) {
    const int64_t end = k + kStep < last ? k + kStep : last;
    const int64_t tiles = div_up(rows, kWideRows) * (width / (2 * kLanes));
    Ahead next(codes + w.bytes(end, width) / 4, w.bytes(end - k, width), tiles * ((end - k) / 32));
    Slice slice{w, panel, k, end, codes + w.bytes(k, width) / 4, nibbles, false, false, &next};
    if (nibbles && rows > kWideRows) {
      spread_nibbles(slice, false, room);
      slice.codes = room;
      slice.nibbles = false;
    }
    for (int64_t r = 0; r < rows; r += kWideRows)
      multiply_wide(int(rows - r < kWideRows ? rows - r : kWideRows), slice, a, row + 2 * r,
                    sums + 2 * r * kPanel);
  }
}

}  // namespace modulm

#endif
