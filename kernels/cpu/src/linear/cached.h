// Products of bytes with codes in a cache: four rows times a whole panel of one step.
//
// A line of codes and a quad of each row are loaded for sixteen products, neighbouring lines one
// after the other. Scales and zeros are converted once for all rows.
#pragma once

#include "linear/slice.h"

#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)
#define MODULM_CACHED 1

namespace modulm {

constexpr int kCachedRows = 4;

// Scales of a step's runs, and zeros as factors of where sums of products begin.
struct alignas(64) StepScales {
  float scales[kStep / kLeastGroup][kPanel], zeros[kStep / kLeastGroup][kPanel];
};

inline void spread_scales(const Slice& s, StepScales& to) {
  const int width = s.w.width(s.panel);
  for (int c = 0; c < width; c += kLanes) {
    Scales<1> group(s, c);
    int run = 0;
    for (int64_t k = s.begin; k < s.end; k += s.w.run(), run++) {
      if (s.grouped) group.load();
      store(&to.scales[run][c], group.scale[0]);
      store(&to.zeros[run][c], group.zero[0] * -s.w.total_of_start());
    }
  }
}

// sums[Rows / Digits][64] += the products of rows from `row` on with Vectors * kLanes columns of a
// slice of one step. Rows are counted in digits. OneRun: the step is one run without a scale of its
// own, so that its integers are what is added.
template <int Rows, int Digits, int Vectors, Lying Kind, bool OneRun>
[[gnu::noinline]] void cached_tile(const Slice& s, const StepScales& scales, const Activations& a,
                                   int64_t row, int column, float* sums) {
  constexpr int whole = Rows / Digits, quads = Kind == kQuads ? 1 : 2;
  const Weight& w = s.w;
  const int64_t ldb = w.width(s.panel), length = w.run();
  const bool zeros = w.zeros;
  const uint32_t* b = s.codes + column;
  const Lookup code_of(w.table);
  const int8_t* x[Rows];
  const int32_t* starts[Rows];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; r++) {
    x[r] = a.at(row + r, 0);
    starts[r] = a.sums + (row + r) * a.runs + s.first_run;
  }
  vf part[whole][Vectors];
  if constexpr (!OneRun)
#pragma GCC unroll 4
    for (int r = 0; r < whole; r++)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) part[r][v] = vf{};
  int run = 0;
  for (int64_t k = s.begin, end; k < s.end; k = end, run++) {
    end = k + length < s.end ? k + length : s.end;
    vi c[Rows][Vectors];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) c[r][v] = splat_int(starts[r][run]);
#pragma GCC unroll 1
    for (int64_t at = k; at < end; at += 16) {
      const int64_t offset = at / kBlockK * Activations::kBlockStride + at % kBlockK;
      s.next->fetch();
#pragma GCC unroll 4
      for (int i = 0; i < 4; i += quads, b += ldb) {
        vu lines[Vectors];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; v++) lines[v] = load_raw<vu>(b + v * kLanes);
#pragma GCC unroll 2
        for (int h = 0; h < quads; h++) {
          vu codes[Vectors];
#pragma GCC unroll 4
          for (int v = 0; v < Vectors; v++) codes[v] = codes_of<Kind>(lines[v], h, code_of);
#pragma GCC unroll 4
          for (int r = 0; r < Rows; r++) {
            const auto quad = hold_quad(x[r] + offset + 4 * (i + h));
#pragma GCC unroll 4
            for (int v = 0; v < Vectors; v++) c[r][v] = quad_dot(c[r][v], codes[v], quad);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < whole; r++) {
      const float start =
          float(join_digits<Digits>(r, [&](int i) { return starts[i][run]; }));
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; v++) {
        const int at = column + v * kLanes;
        const vi dot = join_digits<Digits>(r, [&](int i) { return c[i][v]; });
        vf exact = __builtin_convertvector(dot, vf);
        if constexpr (OneRun) {
          part[r][v] = exact;
          continue;
        }
        if (zeros) exact = fused(load(&scales.zeros[run][at]), start, exact);
        part[r][v] = fused(exact, load(&scales.scales[run][at]), part[r][v]);
      }
    }
  }
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
    if (width == kPanel && one_run)
      return cached_tile<count, Digits, vectors, Kind, true>(s, scales, a, row, 0, sums);
    if (width == kPanel)
      return cached_tile<count, Digits, vectors, Kind, false>(s, scales, a, row, 0, sums);
    for (int c = 0; c < width; c += kLanes)
      cached_tile<count, Digits, 1, Kind, false>(s, scales, a, row, c, sums);
  });
}

}  // namespace modulm

#endif
