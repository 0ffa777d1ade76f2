// Products of three or more rows of bytes with blocks, whose codes are decoded in registers.
//
// What decodes a code costs nothing beside the products of three to six rows, and a buffer of
// decoded codes costs a store for each line. Two vectors of columns at a time, so that sums of a group
// and of a step both stay in registers.
#pragma once

#include "linear/blocks.h"
#include "linear/slice.h"

#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)
#define MODULM_REGISTER_BLOCKS 1

namespace modulm {

constexpr int kRegisterVectors = 2;
constexpr int64_t kRegisterFrom = 3;  // rows

// f(row, rows) over [0, total), total >= 3: three to six rows each, which begin a tile of activations
// or have their second half in one.
template <class F>
inline void for_register_rows(int64_t total, F&& f) {
  for (int64_t r = 0, n; r < total; r += n) {
    const int64_t left = total - r;
    n = left == 7 || left == 8 ? 4 : left < kRowTile ? left : kRowTile;
    f(r, int(n));
  }
}

// Scales of the groups of span `s`, as BlockParts::scales_of has them, without branches.
template <class Type>
[[gnu::always_inline]] inline vu span_scales(const BlockParts<Type>& parts, int s, int v) {
  if constexpr (!Type::kMinima) return parts.scales_of(s, v);
  auto line = [&](int i) { return load_raw<vu>(parts.scales + i * kPanel + v * kLanes); };
  const vu first = line(0), high = (line(2) & 0x0f0f0f0fu) | (first >> 2 & 0x30303030u);
  const vu four = s >= 2 ? high : first & 0x3f3f3f3fu;
  return (vu)_mm512_srl_epi32((__m512i)four, _mm_cvtsi32_si128(s % 2 * 16));
}

// sums[Rows][64] += rows from `row` on times kRegisterVectors * kLanes columns of one step of a
// panel of full width.
template <class Type, int Rows>
[[gnu::noinline]] void register_tile(const uint8_t* block, const Activations& a, int64_t row,
                                     int64_t step, int column, Ahead& ahead, float* sums) {
  constexpr int lower = (Rows + 1) / 2;
  constexpr int quads = Type::kGroup / 4, groups = kSpan / Type::kGroup;
  constexpr int portion = Type::kPortion / 4;  // quads
  const int64_t runs = a.runs;
  const int32_t* totals = totals_of<Type>(a, row, step);
  const int8_t *x = a.at(row, step * kBlock), *upper = a.at(row + lower, step * kBlock);
  const BlockParts<Type> parts(block, kPanel, column);
  const uint32_t* codes_of_span = parts.codes;
  Ahead next = ahead;
  vf part[Rows][kRegisterVectors];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < kRegisterVectors; v++) part[r][v] = vf{};
#pragma GCC unroll 1
  for (int s = 0; s < kSpans; s++) {
    vu scales[kRegisterVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kRegisterVectors; v++) scales[v] = span_scales(parts, s, v);
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) {
      vi c[Rows][kRegisterVectors];
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++) {
        vi start{};
        if constexpr (Type::kCentre != 0) start = splat_int(totals[r * runs + s * groups + g]);
#pragma GCC unroll 4
        for (int v = 0; v < kRegisterVectors; v++) c[r][v] = start;
      }
#pragma GCC unroll 8
      for (int q = 0; q < quads; q++) {
        const int at = g * quads + q;
        if (q % 4 == 0) next.fetch_one();
        vu codes[kRegisterVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kRegisterVectors; v++) {
          const uint32_t* lines =
              codes_of_span + at / portion * Type::kPortionLines * kPanel + v * kLanes;
          auto line = [&](int i) __attribute__((always_inline)) {
            return load_raw<vu>(lines + i * kPanel);
          };
          codes[v] = block_codes<Type>(line, at % portion);
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++) {
          const int8_t* own = r < lower ? x + r * kBlockK : upper + (r - lower) * kBlockK;
          const auto quad = hold_quad(own + 4 * at);
#pragma GCC unroll 4
          for (int v = 0; v < kRegisterVectors; v++) c[r][v] = quad_dot(c[r][v], codes[v], quad);
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < kRegisterVectors; v++) {
        const vf scale = scale_of_group<Type>(scales[v], g);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++)
          part[r][v] = fused(__builtin_convertvector(c[r][v], vf), scale, part[r][v]);
      }
    }
    x += Activations::kBlockStride;
    upper += Activations::kBlockStride;
    codes_of_span += Type::kLines * kPanel;
  }
  ahead = next;
#pragma GCC unroll 4
  for (int v = 0; v < kRegisterVectors; v++) {
    const vf d = load(parts.d + v * kLanes);
    vf least{};
    vu both[4];
    if constexpr (Type::kMinima) {
      least = load(parts.least + v * kLanes);
#pragma GCC unroll 4
      for (int p = 0; p < 4; p++) both[p] = parts.minima_of(p, v);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++) {
      vf sum = block_sum(part[r][v], d);
      if constexpr (Type::kMinima)
        sum = block_sum(part[r][v], d, minima_sum(both, totals + r * runs), least);
      float* to = sums + r * kPanel + column + v * kLanes;
      store(to, fused(sum, a.scales[(row + r) * a.steps + step], load(to)));
    }
  }
}

// sums[rows][64] += rows from `row` on, at least three, times a panel of full width.
template <class Type>
inline void register_panel(const Weight& w, int64_t panel, const Activations& a, int64_t row,
                           int64_t rows, float* sums) {
  constexpr int64_t bytes = kPanel * Type::kBytes;
  int64_t tiles = 0;
  for_register_rows(rows, [&](int64_t, int) { tiles += kPanel / (kRegisterVectors * kLanes); });
  const uint8_t* from = w.panel(panel);
  for (int64_t step = 0; step < a.steps; step++, from += bytes) {
    Ahead next(from + bytes, bytes, tiles * kSpan / 4);
    for_register_rows(rows, [&](int64_t r, int n) {
      with_rows<1, kRowTile, kRegisterFrom>(n, [&](auto count) {
        for (int c = 0; c < kPanel; c += kRegisterVectors * kLanes)
          register_tile<Type, count>(from, a, row + r, step, c, next, sums + r * kPanel);
      });
    });
  }
}

}  // namespace modulm

#endif
