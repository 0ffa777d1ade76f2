// The kernels of integer.h's products, compiled once for linear layers and experts.
#include "linear/integer.h"

#include "linear/blocks.h"
#include "linear/cached.h"
#include "linear/codes.h"
#include "linear/slice.h"
#include "linear/stepped.h"
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
#if defined(MODULM_CACHED)
constexpr int64_t kUnpackedRows = int64_t{1} << 62;
#elif defined(__AVX512F__)
constexpr int64_t kUnpackedRows = kTiled ? 0 : 3 * kQuadRows;
#else
constexpr int64_t kUnpackedRows = 0;
#endif

// Where codes come from: a cache; memory, with prefetches; and, for packed codes on processors that
// stream by themselves, memory that is read without, or for several rows, whose products take
// longer than reading a line, with one prefetch far ahead.
enum Source : int { kCache, kPrefetched, kMemory, kFarAhead };

// `Lines` lines of each vector's codes, with the activations that belong to them. From memory,
// vectors are used one by one as they arrive; from a cache, all at once, so that activations are
// read once for all of them.
template <int Lines, Lying Kind, Source From, int Rows, int Vectors>
[[gnu::always_inline]] inline const uint32_t* quad_lines(const int8_t* x, const uint32_t* b,
                                                         int64_t ldb, const Lookup& code_of,
                                                         Distances ahead, vi (&c)[Rows][Vectors]) {
  constexpr int halves = Kind == kQuads ? 1 : 2;
  auto from_memory = [&]() __attribute__((always_inline)) {
    for (int v = 0; v < Vectors; v++) {
      if constexpr (From == kPrefetched) {
        __builtin_prefetch(b + v * kLanes + ahead.far, 0, 2);
        __builtin_prefetch(b + v * kLanes + ahead.near);
      }
      if constexpr (From == kFarAhead) __builtin_prefetch(b + v * kLanes + kNibblesAhead, 0, 2);
      const vu line = load_raw<vu>(b + v * kLanes);
      for (int h = 0; h < halves; h++) {
        const vu codes = codes_of<Kind>(line, h, code_of);
        for (int r = 0; r < Rows; r++)
          c[r][v] = quad_dot(c[r][v], codes, load_quad(x + r * kBlockK + 4 * h));
      }
    }
  };
  auto from_cache = [&]() __attribute__((always_inline)) {
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
  if constexpr (From == kMemory) {
#pragma GCC unroll 4
    for (int i = 0; i < Lines; i++, b += ldb, x += 4 * halves) from_memory();
  } else if constexpr (From == kPrefetched || From == kFarAhead) {
#pragma GCC unroll 1  // else compilers group the prefetches and stall a row
    for (int i = 0; i < Lines; i++, b += ldb, x += 4 * halves) from_memory();
  } else {
    for (int i = 0; i < Lines; i++, b += ldb, x += 4 * halves) from_cache();
  }
  return b;
}

// The integer products of one run, k in [k, end), both multiples of 16.
template <int Rows, int Vectors, Lying Kind>
[[gnu::always_inline]] inline const uint32_t* quad_run(const int8_t* x, int64_t k, int64_t end,
                                                       const uint32_t* b, int64_t ldb,
                                                       const Slice& s, const Lookup& code_of,
                                                       Distances ahead, vi (&c)[Rows][Vectors]) {
  constexpr int half = 32, lines = half / (Kind == kQuads ? 4 : 8);
  const bool stream = s.stream, alone = Kind != kQuads && streams_by_itself;
  Ahead* const next = s.next;
  // So many lines, which is a constant. Inlined, or sums would go through memory.
  auto take = [&](const int8_t* at, auto count) __attribute__((always_inline)) {
    constexpr int Lines = count;
    if (!stream) return quad_lines<Lines, Kind, kCache>(at, b, ldb, code_of, ahead, c);
    constexpr Source by_itself = Rows > 2 ? kFarAhead : kMemory;
    if (Kind != kQuads && alone)
      return quad_lines<Lines, Kind, by_itself>(at, b, ldb, code_of, ahead, c);
    return quad_lines<Lines, Kind, kPrefetched>(at, b, ldb, code_of, ahead, c);
  };
  auto from = [&] { return x + k / kBlockK * Activations::kBlockStride + k % kBlockK; };
  for (; k + half <= end; k += half) {
    if (next) next->fetch();
    b = take(from(), std::integral_constant<int, lines>{});
  }
  if (k < end) b = take(from(), std::integral_constant<int, lines / 2>{});
  return b;
}

// sums[Rows / Digits][64] += the products; rows are counted in digits. A function of
// its own, with loops unrolled and all calls inlined, or sums would not stay in registers.
template <int Rows, int Digits, int Vectors, Lying Kind>
[[gnu::noinline]] void quad_tile(const Slice& s, const Activations& a, int64_t row, int64_t ldb,
                                 int column, float* sums) {
  const Weight& w = s.w;
  const int64_t length = w.run();
  constexpr int whole = Rows / Digits;
  const int32_t* starts = a.sums + row * a.runs + s.first_run;
  const int8_t* x = a.at(row, 0);
  const uint32_t* b = s.codes + column;
  Scales<Vectors> group(s, column, Kind == kQuads || !streams_by_itself);
  const Lookup code_of(w.table);
  const Distances ahead;
  for (int64_t k = s.begin; k < s.end;) {
    vf part[whole][Vectors] = {};
    int64_t step = k / kStep;
    for (int64_t stop = s.step_end(k), end; k < stop; k = end, starts++) {
      end = k + length < stop ? k + length : stop;
      vi c[Rows][Vectors];
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) c[r][v] = splat_int(starts[r * a.runs]);
      b = quad_run<Rows, Vectors, Kind>(x, k, end, b, ldb, s, code_of, ahead, c);
      if (s.grouped) group.load();
#pragma GCC unroll 8
      for (int r = 0; r < whole; r++) {
        auto start = [&](int i) { return starts[i * a.runs]; };
        const float total = float(join_digits<Digits>(r, start)) * w.total_of_start();
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) {
          const vi dot = join_digits<Digits>(r, [&](int i) { return c[i][v]; });
          part[r][v] = add_run(part[r][v], dot, group.scale[v], w.zeros, group.zero[v], total);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < whole; r++)
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) {
        float* to = sums + r * kPanel + column + v * kLanes;
        store(to, fused(part[r][v], a.scales[(row + Digits * r) * a.steps + step], load(to)));
      }
  }
}

template <int Digits, int Vectors, Lying Kind>
inline void quad_rows(int rows, const Slice& s, const Activations& a, int64_t row, int64_t ldb,
                      int column, float* sums) {
  with_rows<Digits, kQuadRows>(rows, [&](auto count) {
    quad_tile<count, Digits, Vectors, Kind>(s, a, row, ldb, column, sums);
  });
}

// Whole lines of a panel from memory; two vectors of them from a cache, so that sums of integers and
// of floats both stay in registers.
template <int Digits, Lying Kind>
inline void quad_slice(int rows, const Slice& s, const Activations& a, int64_t row, float* sums) {
  constexpr int wide = 4 * kLanes, narrow = 2 * kLanes;
  int width = s.w.width(s.panel), c = 0;
  if (s.stream)
    for (; c + wide <= width; c += wide)
      quad_rows<Digits, 4, Kind>(rows, s, a, row, width, c, sums);
  else
    for (; c + narrow <= width; c += narrow)
      quad_rows<Digits, 2, Kind>(rows, s, a, row, width, c, sums);
  for (; c < width; c += kLanes) quad_rows<Digits, 1, Kind>(rows, s, a, row, width, c, sums);
}

#if defined(__AMX_INT8__)
// sums[rows / digits][64] += scale of the row * the step's runs, from
// dots[runs][rows][Vectors * kLanes].
template <int Digits, int Vectors, bool Centred>
inline void fold_step(const Slice& s, const Activations& a, int64_t row, int rows, int64_t step,
                      int64_t first, int runs, int column, const int32_t* dots, float* sums) {
  constexpr int columns = Vectors * kLanes;
  const bool zeros_kept = !Centred && s.w.zeros;
  alignas(64) vf scales[kStep / kLeastGroup][Vectors], zeros[kStep / kLeastGroup][Vectors];
  for (int g = 0; g < runs; g++) {
    Group<Vectors> group(s.w, s.panel, first + g, column);
    for (int v = 0; v < Vectors; v++) scales[g][v] = group.scale[v], zeros[g][v] = group.zero[v];
  }
  for (int r = 0; r < rows / Digits; r++) {
    const float scale = a.scales[(row + Digits * r) * a.steps + step];
    float* to = sums + r * kPanel + column;
    vf part[Vectors] = {};
    for (int g = 0; g < runs; g++) {
      const int32_t* from = dots + g * kIntegerRows * columns;
      const int32_t start = join_digits<Digits>(
          r, [&](int i) { return a.sums[(row + i) * a.runs + first + g]; });
      const float total = float(start) * s.w.total_of_start();
      for (int v = 0; v < Vectors; v++) {
        vi dot = join_digits<Digits>(
            r, [&](int i) { return load_raw<vi>(from + i * columns + v * kLanes); });
        if (!Centred) dot += start;
        part[v] = add_run(part[v], dot, scales[g][v], zeros_kept, zeros[g][v], total);
      }
    }
    for (int v = 0; v < Vectors; v++)
      store(to + v * kLanes, fused(part[v], scale, load(to + v * kLanes)));
  }
}

// Vectors * 16 columns of one step: tiles for each run, then the fold, which overlaps with the next
// tiles.
template <int Digits, int Vectors>
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
  if (s.centred)
    fold_step<Digits, Vectors, true>(s, a, row, rows, step, first, runs, column, dots, sums);
  else
    fold_step<Digits, Vectors, false>(s, a, row, rows, step, first, runs, column, dots, sums);
}

template <int Digits>
inline void tiled_slice(int rows, const Slice& s, const Activations& a, int64_t row, float* sums) {
  const int width = s.w.width(s.panel);
  tiles.shape(rows, s.w.run() < kBlockK ? int(s.w.run()) : kBlockK);
  for (int64_t k = s.begin; k < s.end; k = s.step_end(k)) {
    const uint32_t* b = s.codes + (k - s.begin) / 4 * width;
    int c = 0;
    if (rows <= 16 && width == kPanel) {
      tiled_columns<Digits, 4>(s, a, row, rows, k, b, 0, sums);
      continue;
    }
    if (rows > 16)
      for (; c + 32 <= width; c += 32) tiled_columns<Digits, 2>(s, a, row, rows, k, b, c, sums);
    for (; c < width; c += 16) tiled_columns<Digits, 1>(s, a, row, rows, k, b, c, sums);
  }
}
#endif

// sums[rows / Digits][64] += the slice's products with rows from `row` on, a multiple of kRowTile;
// rows: 1 to kIntegerRows, to kQuadRows where codes are packed nibbles.
template <int Digits>
inline void multiply_slice(const Slice& s, const Activations& a, int64_t row, int rows,
                           float* sums) {
#if defined(__AMX_INT8__)
  if (!s.nibbles && (rows > kQuadRows || s.centred))
    return tiled_slice<Digits>(rows, s, a, row, sums);
#endif
  with_lying(s.w, s.nibbles, [&](auto kind) { quad_slice<Digits, kind>(rows, s, a, row, sums); });
}

template <int Digits>
void panel_sums(const Weight& w, int64_t panel, const Activations& a, int64_t row, int64_t rows,
                float* sums) {
  bool nibbles = w.format == kWeightInt4;
  int width = w.width(panel);
  auto codes = reinterpret_cast<const uint32_t*>(w.panel(panel));
  int64_t last = w.runs_end();
  if (rows <= kQuadRows) {
    Slice all{w, panel, 0, last, codes, nibbles, false, true, nullptr};
#if defined(MODULM_STEPPED)
    if (is_stepped(w, panel, rows))
      return with_lying(w, nibbles, [&](auto kind) {
        if constexpr (kind != kQuads)
          with_rows<1, kQuadRows, kSteppedFrom>(int(rows), [&](auto count) {
            if constexpr (count % Digits == 0) stepped_tile<count, Digits, kind>(all, a, row, sums);
          });
      });
#endif
    return multiply_slice<Digits>(all, a, row, int(rows), sums);
  }
  const bool shared = nibbles && rows > kUnpackedRows;
  // Whole zeros of two digits are not exact in fp32 once subtracted there, as few rows do it.
  bool centred = kSpreadCentred && shared && w.whole_zeros && !w.table && Digits == 1;
  auto spread = static_cast<uint32_t*>(scratch(kDecoded, kIntegerChunk * kPanel));
#if defined(MODULM_CACHED)
  StepScales scales;
  constexpr int portion = 16;
  const int size = cached_rows<Digits>(w);
  const int64_t tiles = div_up(rows, size);
#else
  constexpr int size = kIntegerRows, portion = 32;
  const int64_t tiles = div_up(rows, size) * (width / (2 * kLanes));
#endif
  for (int64_t k = 0; k < last; k += kIntegerChunk) {
    int64_t end = k + kIntegerChunk < last ? k + kIntegerChunk : last;
    Ahead next(codes + w.bytes(end, width) / 4, w.bytes(end - k, width),
               tiles * ((end - k) / portion));
    Slice slice{w,       panel, k,       end,   codes + w.bytes(k, width) / 4,
                nibbles && !shared, centred, false, kTiled ? nullptr : &next};
    if (shared) {
      spread_nibbles(slice, centred, spread);
      slice.codes = spread;
    }
#if defined(MODULM_CACHED)
    spread_scales(slice, finds_starts(w, a), scales);
    with_lying(w, slice.nibbles, [&](auto kind) {
      for_cached_rows(rows, size, [&](int64_t r, int n) {
        slice.stream = r == 0;
        cached_slice<Digits, kind>(n, slice, scales, a, row + r, sums + r / Digits * kPanel);
      });
    });
#else
    for_row_blocks(rows, size, [&](int64_t r, int n) {
      slice.stream = kTiled && !nibbles && r == 0;
      multiply_slice<Digits>(slice, a, row + r, n, sums + r / Digits * kPanel);
    });
#endif
  }
}

}  // namespace

void integer_sums(const Weight& w, int64_t panel, const Activations& a, int64_t row, int64_t rows,
                  float* sums) {
  if (w.blocks()) return block_sums(w, panel, a, row, rows, sums);
  if (w.digits == 2) panel_sums<2>(w, panel, a, row, rows, sums);
  else panel_sums<1>(w, panel, a, row, rows, sums);
}

#endif

}  // namespace modulm
