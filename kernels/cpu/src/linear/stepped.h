// Five and six rows times a panel of nibbles in memory, two vectors of a step at a time.
//
// All sums stay in registers, of integers and of floats; with four vectors they would not.
// A step's second half comes from the first-level cache, and the next step is fetched meanwhile.
#pragma once

#include "linear/slice.h"

#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)
#define MODULM_STEPPED 1

namespace modulm {

constexpr int kSteppedVectors = 2;
constexpr int kSteppedFrom = 5;  // rows; fewer are not faster

// Whether `stepped_tile` takes so many rows, digits counted: runs are whole blocks of activations.
inline bool is_stepped(const Weight& w, int64_t panel, int64_t rows) {
  return rows >= kSteppedFrom && rows <= kQuadRows && w.format == kWeightInt4 &&
         w.width(panel) == kPanel && w.run() % kBlockK == 0;
}

// The products of kBlockK k of two vectors of codes and Rows rows of activations at x.
template <Lying Kind, int Rows>
[[gnu::always_inline]] inline void stepped_block(const int8_t* x, const uint32_t* b,
                                                 const char* ahead, const Lookup& code_of,
                                                 vi (&c)[Rows][kSteppedVectors]) {
  constexpr int halves = 2, lines = kBlockK / 4 / halves;
#pragma GCC unroll 16
  for (int i = 0; i < lines; i++, b += kPanel, x += 4 * halves) {
    __builtin_prefetch(ahead + 128 * i, 0, 2);
    __builtin_prefetch(ahead + 128 * i + 64, 0, 2);
    vu line[kSteppedVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kSteppedVectors; v++) line[v] = load_raw<vu>(b + v * kLanes);
#pragma GCC unroll 2
    for (int h = 0; h < halves; h++) {
      vu codes[kSteppedVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kSteppedVectors; v++) codes[v] = codes_of<Kind>(line[v], h, code_of);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++) {
        const auto quad = hold_quad(x + r * kBlockK + 4 * h);
#pragma GCC unroll 2
        for (int v = 0; v < kSteppedVectors; v++) c[r][v] = quad_dot(c[r][v], codes[v], quad);
      }
    }
  }
}

// sums[Rows / Digits][64] += the products of a panel of full width. Rows are counted in digits.
template <int Rows, int Digits, Lying Kind>
[[gnu::noinline]] void stepped_tile(const Slice& s, const Activations& a, int64_t row,
                                    float* sums) {
  constexpr int whole = Rows / Digits;
  constexpr int64_t size = kBlockK / 8 * kPanel;  // lanes of a block
  const Weight& w = s.w;
  const int64_t scale_size = scale_bytes(w.scale_dtype);
  const bool zeros = w.zeros, grouped = s.grouped;
  const vf factor = splat(-w.total_of_start());
  const int64_t blocks = w.run() / kBlockK;
  const int64_t next_scale = grouped && w.group == w.run() ? kPanel : 0;
  const Lookup code_of(w.table);
  int64_t scale = s.first_scale;
  const int32_t* starts = a.sums + row * a.runs;
  const int8_t* x = a.at(row, 0);
  const uint32_t* b = s.codes;
  const float* row_scales = a.scales + row * a.steps;
  for (int64_t left = s.end / kBlockK; left > 0; row_scales++) {
    const int64_t many = left < kStep / kBlockK ? left : kStep / kBlockK;
    const int64_t runs = div_up(many, blocks);
    auto ahead = reinterpret_cast<const char*>(b + kStep / kBlockK * size);
    for (int column = 0; column < kPanel; column += kSteppedVectors * kLanes) {
      vf part[whole][kSteppedVectors];
#pragma GCC unroll 8
      for (int r = 0; r < whole; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kSteppedVectors; v++) part[r][v] = vf{};
      const uint32_t* from = b + column;
      const int8_t* at = x;
      int64_t at_scale = scale + column;
      for (int64_t run = 0; run < runs; run++, at_scale += next_scale) {
        vi c[Rows][kSteppedVectors];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++)
#pragma GCC unroll 2
          for (int v = 0; v < kSteppedVectors; v++) c[r][v] = splat_int(starts[r * a.runs + run]);
        const int64_t end = (run + 1) * blocks < many ? (run + 1) * blocks : many;
        for (int64_t i = run * blocks; i < end; i++) {
          stepped_block<Kind>(at, from, ahead, code_of, c);
          from += size;
          at += Activations::kBlockStride;
          ahead += size * 4 / (kPanel / (kSteppedVectors * kLanes));
        }
        if (grouped) {  // of the next step, if each run has its own
          const int64_t to = (at_scale + next_scale * (kStep / kBlockK)) * scale_size;
          __builtin_prefetch(static_cast<const char*>(w.scales) + to, 0, 2);
          if (zeros) __builtin_prefetch(static_cast<const char*>(w.zeros) + to, 0, 2);
        }
        vf scales[kSteppedVectors] = {splat(1.0f), splat(1.0f)}, points[kSteppedVectors] = {};
        if (grouped) {
          load_scales(w.scales, at_scale, w.scale_dtype, scales);
          if (zeros) load_scales(w.zeros, at_scale, w.scale_dtype, points);
        }
        if (zeros)
#pragma GCC unroll 2
          for (int v = 0; v < kSteppedVectors; v++) points[v] *= factor;
#pragma GCC unroll 8
        for (int r = 0; r < whole; r++) {
          const auto start_of = [&](int i) { return starts[i * a.runs + run]; };
          const vf start =
              __builtin_convertvector(splat_int(join_digits<Digits>(r, start_of)), vf);
#pragma GCC unroll 2
          for (int v = 0; v < kSteppedVectors; v++) {
            const vi dot = join_digits<Digits>(r, [&](int i) { return c[i][v]; });
            vf exact = __builtin_convertvector(dot, vf);
            if (zeros) exact = fused(points[v], start, exact);
            part[r][v] = fused(exact, scales[v], part[r][v]);
          }
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < whole; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kSteppedVectors; v++) {
          float* to = sums + r * kPanel + column + v * kLanes;
          store(to, fused(part[r][v], row_scales[Digits * r * a.steps], load(to)));
        }
    }
    starts += runs;
    scale += runs * next_scale;
    x += many * Activations::kBlockStride;
    b += many * size;
    left -= many;
  }
}

}  // namespace modulm

#endif
