// The kernels of integer.h's products, compiled once for linear layers and experts.
#include "linear/integer.h"

#include "linear/blocks.h"
#include "linear/codes.h"
#include "linear/slice.h"
#include "linear/wide.h"

#if defined(__AMX_INT8__)
#include "linear/amx.h"
#endif

namespace modulm {

#if defined(MODULM_WIDE_PAIRS)
void integer_sums(const Weight& w, int64_t panel, const Activations& a, int64_t row, int64_t rows,
                  float* sums) {
  if (w.blocks()) return block_sums(w, panel, a, row, rows, sums);
  wide_sums(w, panel, a, row, rows, sums);
}
#else
namespace {

constexpr int64_t kIntegerChunk = kStep;  // k decoded or multiplied at a time

// Up to here each tile unpacks its nibbles, beside products that leave room for it; from here on a
// buffer of bytes is shared by all tiles.
#if defined(__AVX512F__)
constexpr int64_t kUnpackedRows = kTiled ? 0 : 3 * kQuadRows;
#else
constexpr int64_t kUnpackedRows = 0;
#endif

// `Lines` lines of each vector's codes, with the activations that belong to them. From memory,
// vectors are used one by one as they arrive; from a cache, all at once, so that activations are
// read once for all of them.
template <int Lines, Lying Kind, bool Stream, int Rows, int Vectors>
inline const uint32_t* quad_lines(const int8_t* x, const uint32_t* b, int64_t ldb,
                                  const Lookup& code_of, Distances ahead,
                                  vi (&c)[Rows][Vectors]) {
  constexpr int halves = Kind == kQuads ? 1 : 2;
  auto from_memory = [&] {
    for (int v = 0; v < Vectors; v++) {
      __builtin_prefetch(b + v * kLanes + ahead.far, 0, 2);
      __builtin_prefetch(b + v * kLanes + ahead.near);
      const vu line = load_raw<vu>(b + v * kLanes);
      for (int h = 0; h < halves; h++) {
        const vu codes = codes_of<Kind>(line, h, code_of);
        for (int r = 0; r < Rows; r++)
          c[r][v] = quad_dot(c[r][v], codes, load_quad(x + r * kBlockK + 4 * h));
      }
    }
  };
  auto from_cache = [&] {
    for (int h = 0; h < halves; h++) {
      vu codes[Vectors];
      for (int v = 0; v < Vectors; v++)
        codes[v] = codes_of<Kind>(load_raw<vu>(b + v * kLanes), h, code_of);
      for (int r = 0; r < Rows; r++) {
        const auto quad = hold_quad(x + r * kBlockK + 4 * h);
        for (int v = 0; v < Vectors; v++) c[r][v] = quad_dot(c[r][v], codes[v], quad);
      }
    }
  };
  if constexpr (Stream) {
#pragma GCC unroll 1  // else compilers group the prefetches and stall a row
    for (int i = 0; i < Lines; i++, b += ldb, x += 4 * halves) from_memory();
  } else {
    for (int i = 0; i < Lines; i++, b += ldb, x += 4 * halves) from_cache();
  }
  return b;
}

// The integer products of one run, k in [k, end), both multiples of 16.
template <int Rows, int Vectors, Lying Kind>
inline const uint32_t* quad_run(const int8_t* x, int64_t k, int64_t end, const uint32_t* b,
                                int64_t ldb, const Slice& s, const Lookup& code_of,
                                Distances ahead, vi (&c)[Rows][Vectors]) {
  constexpr int half = 32, lines = half / (Kind == kQuads ? 4 : 8);
  const bool stream = s.stream;
  Ahead* const next = s.next;
  auto from = [&] { return x + k / kBlockK * Activations::kBlockStride + k % kBlockK; };
  for (; k + half <= end; k += half) {
    if (next) next->fetch();
    b = stream ? quad_lines<lines, Kind, true>(from(), b, ldb, code_of, ahead, c)
               : quad_lines<lines, Kind, false>(from(), b, ldb, code_of, ahead, c);
  }
  if (k < end)
    b = stream ? quad_lines<lines / 2, Kind, true>(from(), b, ldb, code_of, ahead, c)
               : quad_lines<lines / 2, Kind, false>(from(), b, ldb, code_of, ahead, c);
  return b;
}

template <int Rows, int Vectors, Lying Kind>
inline void quad_tile(const Slice& s, const Activations& a, int64_t row, int64_t ldb, int column,
                      float* sums) {
  const Weight& w = s.w;
  const int64_t length = w.run();
  const int32_t* totals = a.sums + row * a.runs + s.first_run;
  const int8_t* x = a.at(row, 0);
  const uint32_t* b = s.codes + column;
  Scales<Vectors> group(s, column);
  const Lookup code_of(w.table);
  const Distances ahead;
  for (int64_t k = s.begin; k < s.end;) {
    vf part[Rows][Vectors] = {};
    int64_t step = k / kStep;
    for (int64_t stop = s.step_end(k), end; k < stop; k = end, totals++) {
      end = k + length < stop ? k + length : stop;
      vi c[Rows][Vectors];
      for (int r = 0; r < Rows; r++)
        for (int v = 0; v < Vectors; v++)
          c[r][v] = splat_int(-w.centre() * totals[r * a.runs]);
      b = quad_run<Rows, Vectors, Kind>(x, k, end, b, ldb, s, code_of, ahead, c);
      if (s.grouped) group.load();
      for (int r = 0; r < Rows; r++) {
        const float total = float(totals[r * a.runs]);
        for (int v = 0; v < Vectors; v++)
          part[r][v] = add_run(part[r][v], c[r][v], group.scale[v], w.zeros, group.zero[v], total);
      }
    }
    for (int r = 0; r < Rows; r++)
      for (int v = 0; v < Vectors; v++) {
        float* to = sums + r * kPanel + column + v * kLanes;
        store(to, fused(part[r][v], a.scales[(row + r) * a.steps + step], load(to)));
      }
  }
}

template <int Vectors, Lying Kind>
inline void quad_rows(int rows, const Slice& s, const Activations& a, int64_t row, int64_t ldb,
                      int column, float* sums) {
  switch (rows) {
    case 1: return quad_tile<1, Vectors, Kind>(s, a, row, ldb, column, sums);
    case 2: return quad_tile<2, Vectors, Kind>(s, a, row, ldb, column, sums);
#if defined(MODULM_MANY_REGISTERS)
    case 3: return quad_tile<3, Vectors, Kind>(s, a, row, ldb, column, sums);
    case 4: return quad_tile<4, Vectors, Kind>(s, a, row, ldb, column, sums);
#endif
#if defined(MODULM_QUAD_DOT)
    case 5: return quad_tile<5, Vectors, Kind>(s, a, row, ldb, column, sums);
    case 6: return quad_tile<6, Vectors, Kind>(s, a, row, ldb, column, sums);
#endif
  }
}

// Whole lines of a panel from memory; two vectors of them from a cache, so that sums of integers and
// of floats both stay in registers.
template <Lying Kind>
inline void quad_slice(int rows, const Slice& s, const Activations& a, int64_t row, float* sums) {
  constexpr int wide = 4 * kLanes, narrow = 2 * kLanes;
  int width = s.w.width(s.panel), c = 0;
  if (s.stream)
    for (; c + wide <= width; c += wide) quad_rows<4, Kind>(rows, s, a, row, width, c, sums);
  else
    for (; c + narrow <= width; c += narrow) quad_rows<2, Kind>(rows, s, a, row, width, c, sums);
  for (; c < width; c += kLanes) quad_rows<1, Kind>(rows, s, a, row, width, c, sums);
}

#if defined(__AMX_INT8__)
// sums[rows][64] += scale of the row * the step's runs, from dots[runs][rows][Vectors * kLanes].
template <int Vectors, bool Centred>
inline void fold_step(const Slice& s, const Activations& a, int64_t row, int rows, int64_t step,
                      int64_t first, int runs, int column, const int32_t* dots, float* sums) {
  constexpr int columns = Vectors * kLanes;
  const bool zeros_kept = !Centred && s.w.zeros;
  alignas(64) vf scales[kStep / kLeastGroup][Vectors], zeros[kStep / kLeastGroup][Vectors];
  for (int g = 0; g < runs; g++) {
    Group<Vectors> group(s.w, s.panel, first + g, column);
    for (int v = 0; v < Vectors; v++) scales[g][v] = group.scale[v], zeros[g][v] = group.zero[v];
  }
  for (int r = 0; r < rows; r++) {
    float scale = a.scales[(row + r) * a.steps + step];
    const int32_t* totals = a.sums + (row + r) * a.runs + first;
    float* to = sums + r * kPanel + column;
    vf part[Vectors] = {};
    for (int g = 0; g < runs; g++) {
      const int32_t* from = dots + (g * kIntegerRows + r) * columns;
      float total = float(totals[g]);
      int32_t offset = Centred ? 0 : s.w.centre() * totals[g];
      for (int v = 0; v < Vectors; v++) {
        vi dot = load_raw<vi>(from + v * kLanes) - offset;
        part[v] = add_run(part[v], dot, scales[g][v], zeros_kept, zeros[g][v], total);
      }
    }
    for (int v = 0; v < Vectors; v++)
      store(to + v * kLanes, fused(part[v], scale, load(to + v * kLanes)));
  }
}

// Vectors * 16 columns of one step: tiles for each run, then the fold, which overlaps with the next
// tiles.
template <int Vectors>
inline void tiled_columns(const Slice& s, const Activations& a, int64_t row, int rows, int64_t k,
                          const uint32_t* b, int column, float* sums) {
  constexpr int columns = Vectors * kLanes;
  alignas(64) int32_t dots[kStep / kLeastGroup * kIntegerRows * columns];
  const Weight& w = s.w;
  int64_t ldb = w.width(s.panel), step = k / kStep, first = k / w.run();
  int depth = w.run() < kBlockK ? int(w.run()) : kBlockK, runs = 0;
  for (int64_t stop = s.step_end(k); k < stop; runs++) {
    int64_t end = w.run_end(first + runs);
    QuadTiles q{a.at(row, k), Activations::kBlockStride, a.blocks * Activations::kBlockStride,
                b + column, ldb, depth, (end - k) / depth, s.stream && column == 0};
    int32_t* to = dots + runs * kIntegerRows * columns;
    if (w.format == kWeightInt4 && !w.table) amx_quads<Vectors, true>(q, rows, to);
    else amx_quads<Vectors, false>(q, rows, to);
    b += (end - k) / 4 * ldb;
    k = end;
  }
  if (s.centred) fold_step<Vectors, true>(s, a, row, rows, step, first, runs, column, dots, sums);
  else fold_step<Vectors, false>(s, a, row, rows, step, first, runs, column, dots, sums);
}

inline void tiled_slice(int rows, const Slice& s, const Activations& a, int64_t row, float* sums) {
  const int width = s.w.width(s.panel);
  tiles.shape(rows, s.w.run() < kBlockK ? int(s.w.run()) : kBlockK);
  for (int64_t k = s.begin; k < s.end; k = s.step_end(k)) {
    const uint32_t* b = s.codes + (k - s.begin) / 4 * width;
    int c = 0;
    if (rows <= 16 && width == kPanel) {
      tiled_columns<4>(s, a, row, rows, k, b, 0, sums);
      continue;
    }
    if (rows > 16)
      for (; c + 32 <= width; c += 32) tiled_columns<2>(s, a, row, rows, k, b, c, sums);
    for (; c < width; c += 16) tiled_columns<1>(s, a, row, rows, k, b, c, sums);
  }
}
#endif

// sums[rows][64] += the slice's products with rows from `row` on, a multiple of kRowTile; rows:
// 1 to kIntegerRows, to kQuadRows where codes are packed nibbles.
inline void multiply_slice(const Slice& s, const Activations& a, int64_t row, int rows,
                           float* sums) {
  if (s.nibbles && s.w.table) return quad_slice<kLookedUp>(rows, s, a, row, sums);
  if (s.nibbles) return quad_slice<kNibbles>(rows, s, a, row, sums);
#if defined(__AMX_INT8__)
  if (rows > kQuadRows || s.centred) return tiled_slice(rows, s, a, row, sums);
#endif
  quad_slice<kQuads>(rows, s, a, row, sums);
}

}  // namespace

void integer_sums(const Weight& w, int64_t panel, const Activations& a, int64_t row, int64_t rows,
                  float* sums) {
  if (w.blocks()) return block_sums(w, panel, a, row, rows, sums);
  bool nibbles = w.format == kWeightInt4;
  int width = w.width(panel);
  auto codes = reinterpret_cast<const uint32_t*>(w.panel(panel));
  int64_t last = w.runs_end();
  if (rows <= kQuadRows) {
    Slice all{w, panel, 0, last, codes, nibbles, false, true, nullptr};
    return multiply_slice(all, a, row, int(rows), sums);
  }
  const bool shared = nibbles && rows > kUnpackedRows;
  bool centred = kSpreadCentred && shared && w.whole_zeros && !w.table;
  auto spread = static_cast<uint32_t*>(scratch(kDecoded, kIntegerChunk * kPanel));
  for (int64_t k = 0; k < last; k += kIntegerChunk) {
    int64_t end = k + kIntegerChunk < last ? k + kIntegerChunk : last;
    const int64_t tiles = div_up(rows, kIntegerRows) * (width / (2 * kLanes));
    Ahead next(codes + w.bytes(end, width) / 4, w.bytes(end - k, width), tiles * ((end - k) / 32));
    Slice slice{w,       panel, k,       end,   codes + w.bytes(k, width) / 4,
                nibbles && !shared, centred, false, kTiled ? nullptr : &next};
    if (shared) {
      spread_nibbles(slice, centred, spread);
      slice.codes = spread;
    }
    for_row_blocks(rows, kIntegerRows, [&](int64_t r, int n) {
      slice.stream = kTiled && !nibbles && r == 0;
      multiply_slice(slice, a, row + r, n, sums + r * kPanel);
    });
  }
}

#endif

}  // namespace modulm
