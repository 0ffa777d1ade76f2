#include "linear/wide.h"

#include "base/pool.h"
#include "linear/codes.h"
#include "linear/product.h"

#if defined(MODULM_WIDE_PAIRS)

namespace modulm {
namespace {

constexpr int64_t kFewWideRows = 2 * kWideRows;  // up to here codes are widened by each tile

// Vectors * kLanes columns of a slice. row: counted in digits. Not inlined: in a larger function, not
// all sums would be in registers.
template <int Rows, int Vectors, Lying Kind>
[[gnu::noinline]] void wide_tile(const Slice& s, const Activations& a, int64_t row, int column,
                                 float* sums) {
  constexpr int deep = 2 * pairs_of_line(Kind), portion = 32;
  const Weight& w = s.w;
  const int64_t ldb = Kind == kWidened ? kSquareLine : w.width(s.panel);
  const int64_t length = w.run(), stride = a.blocks * 2 * kBlockK;
  const int32_t* starts = a.sums + row * a.runs + s.first_run;
  const int8_t* x = a.at(row, 0) + 2 * s.begin;
  const uint32_t* b = s.codes + (Kind == kWidened ? column / kSquareColumns * kSquare : column);
  Scales<Vectors> group(s, column);
  const Lookup code_of(w.table);
  for (int64_t k = s.begin; k < s.end;) {
    vf part[Rows][Vectors] = {};
    const int64_t step = k / kStep;
    for (int64_t stop = s.step_end(k), end; k < stop; k = end, starts++) {
      end = k + length < stop ? k + length : stop;
      vi c[Rows][Vectors];
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++)
          c[r][v] = splat_int(starts[2 * r * a.runs]);
      for (int64_t left = (end - k) / deep; left > 0; left -= portion / deep) {
        if (s.next) s.next->fetch();
        const int64_t lines = left < portion / deep ? left : portion / deep;
        for (int64_t i = 0; i < lines; i++, b += ldb, x += 2 * deep) {
          if constexpr (Rows == 1 && Vectors > 2) wide_line_of_one<Kind>(x, b, code_of, c);
          else wide_line<Kind>(x, stride, b, code_of, c);
        }
      }
      if (s.grouped) group.load();
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++) {
        const float total = float(starts[2 * r * a.runs]) * w.total_of_start();
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++)
          part[r][v] = add_run(part[r][v], c[r][v], group.scale[v], w.zeros, group.zero[v], total);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) {
        float* to = sums + r * kPanel + column + v * kLanes;
        store(to, fused(part[r][v], a.scales[(row + 2 * r) * a.steps + step], load(to)));
      }
  }
}

template <int Vectors, Lying Kind>
inline void wide_rows(int rows, const Slice& s, const Activations& a, int64_t row, int column,
                      float* sums) {
  with_rows<1, kWideRows>(rows, [&](auto count) {
    wide_tile<count, Vectors, Kind>(s, a, row, column, sums);
  });
}

// One row of one digit times a panel of nibbles, whose runs are multiples of kByteRun.
[[gnu::noinline]] void nibbles_row(const Slice& s, const Activations& a, int64_t row, float* sums) {
  constexpr int vectors = kPanel / kLanes;
  const Weight& w = s.w;
  const int64_t length = w.run();
  const int32_t* starts = a.sums + row * a.runs;
  const uint32_t* b = s.codes;
  auto x = static_cast<int8_t*>(scratch(kDecoded, s.end));
  narrow_digits(a.at(row, 0), s.end, x);
  Scales<vectors> group(s, 0);
  for (int64_t k = 0; k < s.end;) {
    vf part[vectors] = {};
    const int64_t step = k / kStep;
    for (int64_t stop = s.step_end(k), end; k < stop; starts++) {
      end = k + length < stop ? k + length : stop;
      vi c[vectors];
      for (int v = 0; v < vectors; v++) c[v] = splat_int(starts[0]);
      for (; k < end; k += kByteRun, x += kByteRun, b += kByteRun / 8 * kPanel)
        add_nibbles(x, b, c);
      if (s.grouped) group.load();
      const float total = float(starts[0]) * w.total_of_start();
      for (int v = 0; v < vectors; v++)
        part[v] = add_run(part[v], c[v], group.scale[v], w.zeros, group.zero[v], total);
    }
    for (int v = 0; v < vectors; v++) {
      float* to = sums + v * kLanes;
      store(to, fused(part[v], a.scales[row * a.steps + step], load(to)));
    }
  }
}

template <Lying Kind>
inline void wide_slice(int rows, const Slice& s, const Activations& a, int64_t row, float* sums) {
  const int width = s.w.width(s.panel);
  if (rows == 1 && width == kPanel)
    return wide_tile<1, kPanel / kLanes, Kind>(s, a, row, 0, sums);
  for (int c = 0; c < width; c += 2 * kLanes) wide_rows<2, Kind>(rows, s, a, row, c, sums);
}

// Many rows: squares two at a time, which stay in the first-level cache meanwhile.
inline void wide_squares(const Slice& s, const Activations& a, int64_t row, int64_t rows, int size,
                         float* sums) {
  const int width = s.w.width(s.panel);
  for (int c = 0; c < width; c += 2 * kSquareColumns)
    for_row_blocks(rows, size, [&](int64_t r, int n) {
      for (int i = c; i < c + 2 * kSquareColumns && i < width; i += kSquareColumns)
        wide_rows<2, kWidened>(n, s, a, row + 2 * r, i, sums + r * kPanel);
    });
}

}  // namespace

void wide_sums(const Weight& w, int64_t panel, const Activations& a, int64_t row, int64_t digits,
               float* sums) {
  const bool nibbles = w.format == kWeightInt4;
  const int width = w.width(panel);
  const auto codes = reinterpret_cast<const uint32_t*>(w.panel(panel));
  const int64_t last = w.runs_end(), rows = digits / 2;
  with_lying(w, nibbles, [&](auto lying) {
    constexpr Lying Kind = lying;
    if (rows == 1) {
      const Slice all{w, panel, 0, last, codes, nibbles, false, true, nullptr};
      if (Kind == kNibbles && w.digits == 1 && width == kPanel && w.run() % kByteRun == 0)
        return nibbles_row(all, a, row, sums);
      return wide_slice<Kind>(1, all, a, row, sums);
    }
    const Lookup code_of(w.table);
    const int size = int(div_up(rows, div_up(rows, kWideRows)));  // of blocks of rows
    auto squares = static_cast<uint32_t*>(scratch(kDecoded, 4 * kPanel / kSquareColumns * kSquare));
    for (int64_t k = 0; k < last; k += kStep) {
      const int64_t end = k + kStep < last ? k + kStep : last;
      const int64_t tiles = div_up(rows, kWideRows) * (width / kSquareColumns);
      Ahead next(codes + w.bytes(end, width) / 4, w.bytes(end - k, width),
                 tiles * ((end - k) / 32));
      Slice slice{w, panel, k, end, codes + w.bytes(k, width) / 4, nibbles, false, false, &next};
      if (rows <= kFewWideRows) {
        for_row_blocks(rows, size, [&](int64_t r, int n) {
          wide_slice<Kind>(n, slice, a, row + 2 * r, sums + r * kPanel);
        });
        continue;
      }
      widen_lines<Kind>(slice.codes, width, (end - k) / (2 * pairs_of_line(Kind)), code_of,
                        squares);
      slice.codes = squares;
      wide_squares(slice, a, row, rows, size, sums);
    }
  });
}

}  // namespace modulm

#endif
