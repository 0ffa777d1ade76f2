// Products of bytes with codes in a cache: three or four rows times a whole panel of one step.
//
// A line of codes and a quad of each row are loaded for twelve or sixteen products, neighbouring
// lines one after the other. Scales and zeros are converted once for all rows.
#pragma once

#include <algorithm>

#include "linear/slice.h"

#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)
#define MODULM_CACHED 1

namespace modulm {

// The most rows of a tile. With one digit and several runs a step, sums of the step take as many
// registers as those of a run, and four rows would keep them in memory: to store a vector takes
// the time of one or two products.
constexpr int kCachedRows = 4, kCachedGroupedRows = 3;

constexpr int64_t kCodesAgainAhead = 1024;  // lanes

template <int Digits>
inline int cached_rows(const Weight& w) {
  return Digits == 1 && (w.grouped() || w.run() < kStep) ? kCachedGroupedRows : kCachedRows;
}

// f(row, rows) over [0, total) in tiles of `size`, two and two rows rather than three and one.
template <class F>
inline void for_cached_rows(int64_t total, int size, F&& f) {
  for (int64_t r = 0, n; r < total; r += n) {
    const int64_t left = total - r;
    n = left < size ? left : size;
    if (size == 3 && left == 4) n = 2;
    f(r, int(n));
  }
}

inline bool finds_starts(const Weight& w, const Activations& a) {
  return a.starts_of_zeros && w.zeros && w.whole_zeros;
}

// Scales of a step's runs, and zeros as factors of where sums of products begin, or if these are
// found by zeros, as bits of int32, in which only the lowest four count.
struct alignas(64) StepScales {
  float scales[kStep / kLeastGroup][kPanel], zeros[kStep / kLeastGroup][kPanel];
};

inline void spread_scales(const Slice& s, bool finds, StepScales& to) {
  const int width = s.w.width(s.panel);
  const int64_t runs = div_up(s.end - s.begin, s.w.run());
  auto spread = [&](const void* from, int64_t first, auto&& with, float (*lines)[kPanel]) {
    const int64_t bytes = scale_bytes(s.w.scale_dtype), next = s.w.group == s.w.run() ? width : 0;
    auto ahead = static_cast<const char*>(from) + (first + kScalesAhead) * bytes;
    for (int64_t i = 0; i < runs * next * bytes; i += 64) __builtin_prefetch(ahead + i);
    auto take = [&](auto* numbers) {
      for (int64_t run = 0; run < runs; run++)
        for (int c = 0; c < width; c += kLanes)
          store(&lines[run][c], with(load(numbers + first + run * next + c)));
    };
    switch (s.w.scale_dtype) {
      case kF32: return take(static_cast<const float*>(from));
      case kBF16: return take(static_cast<const bf16*>(from));
      case kFP16: return take(static_cast<const fp16*>(from));
    }
    for (int64_t run = 0; run < runs; run++)
      for (int c = 0; c < width; c += kLanes)
        store(&lines[run][c], with(load_scales(from, first + run * next + c, kE8M0)));
  };
  if (s.grouped) spread(s.w.scales, s.first_scale, [](vf x) { return x; }, to.scales);
  else if (s.w.zeros || runs > 1 || width < kPanel) std::fill_n(to.scales[0], runs * kPanel, 1.0f);
  const float factor = -s.w.total_of_start();
  if (s.w.zeros && finds)  // a whole number and this one: its lowest bits are the number's
    spread(s.w.zeros, s.first_scale, [](vf x) { return x + (0x1p23f + 8); }, to.zeros);
  else if (s.w.zeros)
    spread(s.w.zeros, s.first_scale, [=](vf x) { return x * factor; }, to.zeros);
}

// What happens at the ends of runs: nothing, the step is one run without a scale of its own, so that
// its integers are what is added; or sums are scaled, zeros subtracted from them; or sums have begun
// where zeros put them, and are scaled.
enum Ends : int { kOneRun, kScaled, kFound };

// sums[Rows / Digits][64] += the products of rows from `row` on with Vectors * kLanes columns of a
// slice of one step. Rows are counted in digits. Those of the second half (of three: the last) may lie
// in the next tile of activations.
template <int Rows, int Digits, int Vectors, Lying Kind, Ends Run>
[[gnu::noinline]] void cached_tile(const Slice& s, const StepScales& scales, const Activations& a,
                                   int64_t row, int column, float* sums) {
  constexpr int whole = Rows / Digits, quads = Kind == kQuads ? 1 : 2;
  const Weight& w = s.w;
  const int64_t ldb = w.width(s.panel), length = w.run(), runs = a.runs, last = s.end;
  const bool zeros = Run == kScaled && w.zeros;
  const uint32_t* b = s.codes + column;
  const Lookup code_of(w.table);
  constexpr int lower = (Rows + 1) / 2;  // rows before those that may be in the next tile
  const int8_t *x = a.at(row, s.begin), *upper = a.at(row + lower, s.begin);
  const int32_t* starts = a.sums + row * runs + s.first_run;
  const float *scale = &scales.scales[0][column], *zero = &scales.zeros[0][column];
  const int32_t* found = a.starts_of_zeros + (row * runs + s.first_run) * kLanes;
  Ahead next = *s.next;
  const bool again = Digits == 1 && s.stream;  // what was dropped when it was fetched before
  vf part[whole][Vectors];
  if constexpr (Run != kOneRun)
#pragma GCC unroll 4
    for (int r = 0; r < whole; r++)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) part[r][v] = vf{};
  for (int64_t k = s.begin, end; k < last;
       starts++, found += kLanes, scale += kPanel, zero += kPanel) {
    end = k + length < last ? k + length : last;
    vi c[Rows][Vectors];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) {
        if constexpr (Run == kFound)
          c[r][v] = (vi)_mm512_permutexvar_epi32(_mm512_load_si512(zero + v * kLanes),
                                                 _mm512_load_si512(found + r * runs * kLanes));
        else c[r][v] = splat_int(starts[r * runs]);
      }
#pragma GCC unroll 1
    do {
      next.fetch_one();
#pragma GCC unroll 4
      for (int i = 0; i < 4; i += quads, b += ldb) {
        vu lines[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) lines[v] = load_raw<vu>(b + v * kLanes);
        if (again)
#pragma GCC unroll 4
          for (int v = 0; v < Vectors; v++)
            __builtin_prefetch(b + v * kLanes + kCodesAgainAhead, 0, 2);
#pragma GCC unroll 2
        for (int h = 0; h < quads; h++) {
          vu codes[Vectors];
#pragma GCC unroll 4
          for (int v = 0; v < Vectors; v++) codes[v] = codes_of<Kind>(lines[v], h, code_of);
#pragma GCC unroll 4
          for (int r = 0; r < Rows; r++) {
            const int8_t* own = r < lower ? x + r * kBlockK : upper + (r - lower) * kBlockK;
            const auto quad = hold_quad(own + 4 * (i + h));
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; v++) c[r][v] = quad_dot(c[r][v], codes[v], quad);
          }
        }
      }
      k += 16;
      const int64_t further = k % kBlockK ? 16 : Activations::kBlockStride - kBlockK + 16;
      x += further;
      upper += further;
    } while (k < end);
#pragma GCC unroll 4
    for (int r = 0; r < whole; r++) {
      vf start;
      if (zeros) start = __builtin_convertvector(
          join_digits<Digits>(r, [&](int i) { return splat_int(starts[i * runs]); }), vf);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) {
        const vi dot = join_digits<Digits>(r, [&](int i) { return c[i][v]; });
        vf exact = __builtin_convertvector(dot, vf);
        if constexpr (Run == kOneRun) {
          part[r][v] = exact;
          continue;
        }
        if (zeros) exact = fused(load(zero + v * kLanes), start, exact);
        part[r][v] = fused(exact, load(scale + v * kLanes), part[r][v]);
      }
    }
  }
  *s.next = next;
  const int64_t step = s.begin / kStep;
#pragma GCC unroll 4
  for (int r = 0; r < whole; r++)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; v++) {
      float* to = sums + r * kPanel + column + v * kLanes;
      store(to, fused(part[r][v], a.scales[(row + Digits * r) * a.steps + step], load(to)));
    }
}

template <int Digits, Lying Kind>
inline void cached_slice(int rows, const Slice& s, const StepScales& scales, const Activations& a,
                         int64_t row, float* sums) {
  constexpr int vectors = kPanel / kLanes;
  const int width = s.w.width(s.panel);
  const bool one_run = s.end - s.begin <= s.w.run() && !s.grouped && !s.w.zeros;
  with_rows<Digits, kCachedRows>(rows, [&](auto count) {
    if constexpr (Digits == 1 && Kind == kNibbles && count <= kCachedGroupedRows) {
      if (finds_starts(s.w, a)) {
        if (width == kPanel)
          return cached_tile<count, Digits, vectors, Kind, kFound>(s, scales, a, row, 0, sums);
        for (int c = 0; c < width; c += kLanes)
          cached_tile<count, Digits, 1, Kind, kFound>(s, scales, a, row, c, sums);
        return;
      }
    }
    if constexpr (Digits == 2 || count <= kCachedGroupedRows) {
      if (!one_run && width == kPanel)
        return cached_tile<count, Digits, vectors, Kind, kScaled>(s, scales, a, row, 0, sums);
    }
    if (width == kPanel)
      return cached_tile<count, Digits, vectors, Kind, kOneRun>(s, scales, a, row, 0, sums);
    for (int c = 0; c < width; c += kLanes)
      cached_tile<count, Digits, 1, Kind, kScaled>(s, scales, a, row, c, sums);
  });
}

}  // namespace modulm

#endif
