// Many rows in bf16 through tile registers: squares of 32 rows x 32 columns, each summed over all of
// k without leaving the registers.
//
// A thread keeps some columns of the weight in its second-level cache, as contiguous tiles of 1 KB,
// and multiplies all rows with them. 32 rows stay in the first-level cache while the columns are
// read, and the next rows are prefetched meanwhile.
#pragma once

#if defined(__AMX_BF16__)

#include <cstring>

#include "base/pool.h"
#include "base/vec.h"
#include "linear/amx.h"
#include "linear/product.h"

namespace modulm {

constexpr int64_t kTiledRows = 256;  // from here on copies are worth their time
constexpr int kSquareRows = 32, kSquareColumns = 32;
constexpr int kSquare = kSquareRows * kSquareColumns;
constexpr int64_t kTileK = 32;                 // k of a tile
constexpr int64_t kStepBytes = 2048;           // of either side: two tiles
constexpr int64_t kNearSteps = 16;             // of a side that stays in the first-level cache
constexpr int64_t kColumnBytes = 3 << 18;      // per thread: under half of a second-level cache

// Rows of x as [padded k / 32][32 rows][32 k]; rows past the last are undefined.
template <class T>
void copy_row_tiles(const T* x, int64_t ldx, int64_t rows, int64_t k, int64_t padded, bf16* to) {
  for (int64_t r = 0; r < rows; r++, x += ldx, to += kTileK)
    for (int64_t i = 0; i < padded; i += kTileK) {
      int64_t there = k - i < 0 ? 0 : k - i < kTileK ? k - i : kTileK;
      bf16* line = to + i * kSquareRows;
      if (there < kTileK) std::memset(line, 0, kTileK * sizeof(bf16));
      for_lanes(there, [&](int64_t c, int n) { store_n(line + c, load_n(x + i + c, n), n); });
    }
}

// 32 columns of a panel as [k / 32][2][16 pairs][16]; `two`: there are more than 16.
inline void copy_column_tiles(const uint32_t* b, int64_t ldb, bool two, int64_t steps,
                              uint32_t* to) {
  constexpr int ahead = 32;  // pairs
  for (int64_t i = 0; i < steps; i++, to += 512)
    for (int r = 0; r < 16; r++, b += ldb) {
      __builtin_prefetch(b + ahead * ldb);
      store_raw(to + r * 16, load_raw<vu>(b));
      if (two) store_raw(to + 256 + r * 16, load_raw<vu>(b + 16));
    }
}

struct Square {
  const bf16* a;      // [steps][2][16 rows][32 k]
  const uint32_t* b;  // [steps][2][16 pairs][16 columns]
  int64_t steps;
  const char* fetch;  // memory to prefetch to the second-level cache meanwhile
  int lines;          // of it in each step
};

// The registers of the instructions must be literals.
#define MODULM_LOAD_TILE(near, tile, from)          \
  if constexpr (near) _tile_loadd(tile, from, 64);  \
  else _tile_stream_loadd(tile, from, 64)

// `Near`: rows are read again soon. Otherwise they bypass the first-level cache.
template <bool Near, class F>
inline void amx_steps(Square& s, int64_t begin, int64_t end, F&& meanwhile) {
  Awake awake;
  for (int64_t i = begin; i < end; i++, s.a += 1024, s.b += 512) {
    _tile_stream_loadd(6, s.b, 64);
    MODULM_LOAD_TILE(Near, 4, s.a);
    _tile_dpbf16ps(0, 4, 6);
    _tile_stream_loadd(7, s.b + 256, 64);
    _tile_dpbf16ps(1, 4, 7);
    MODULM_LOAD_TILE(Near, 5, s.a + 512);
    _tile_dpbf16ps(2, 5, 6);
    for (int l = 0; l < s.lines; l++, s.fetch += 64) _mm_prefetch(s.fetch, _MM_HINT_T1);
    awake.stay();
    meanwhile(i);
    _tile_dpbf16ps(3, 5, 7);
  }
}

#undef MODULM_LOAD_TILE

// sums[2][2][16][16] = a * b; meanwhile(i) is called in step i.
template <class F>
inline void amx_whole_square(Square s, float* sums, F&& meanwhile) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  int64_t near = s.steps < kNearSteps ? s.steps : kNearSteps;
  amx_steps<true>(s, 0, near, meanwhile);
  amx_steps<false>(s, near, s.steps, meanwhile);
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}

// Rows of a square that remain to be written.
template <class T>
struct Waiting {
  const float* sums;  // [2][2][16][16]
  T* out;
  const float* bias;
  int64_t ldo, rows, columns;

  void write(int64_t r) const {
    const float* from = sums + r / 16 * 512 + r % 16 * 16;
    T* to = out + r * ldo;
    for_lanes(columns, [&](int64_t c, int n) {
      vf base = bias ? load_n(bias + c, n) : vf{};
      store_n(to + c, load(from + c * 16) + base, n);
    });
  }
  void write_from(int64_t first) const {
    for (int64_t r = first; r < rows; r++) write(r);
  }
};

// The squares of one task, one after the other. The rows of a square are written one by one during
// the steps of the next, so that nothing waits for sums to leave the tiles.
template <class T>
class Squares {
 public:
  explicit Squares(const Product& p) : p_(p), steps_(p.w.padded_k() / kTileK) {}
  ~Squares() { waiting_.write_from(0); }

  // b: tiles of the columns from `column` on. fetch: lines * steps lines that are needed soon.
  void add(int64_t row, int64_t column, const uint32_t* b, const char* fetch, int lines) {
    auto x = static_cast<const bf16*>(p_.x) + row * p_.w.padded_k();
    amx_whole_square({x, b, steps_, fetch, lines}, sums_[turn_], [&](int64_t i) {
      if (i < waiting_.rows) waiting_.write(i);
    });
    waiting_.write_from(steps_);
    int64_t rows = p_.rows - row, columns = p_.w.n - column;
    waiting_ = {sums_[turn_],
                static_cast<T*>(p_.out) + row * p_.ldo + column,
                p_.bias ? p_.bias + column : nullptr,
                p_.ldo,
                rows < kSquareRows ? rows : kSquareRows,
                columns < kSquareColumns ? columns : kSquareColumns};
    turn_ ^= 1;
  }

 private:
  const Product& p_;
  int64_t steps_;
  Waiting<T> waiting_{};
  int turn_ = 0;
  alignas(64) float sums_[2][kSquare];
};

inline void copy_columns(const Weight& w, int64_t column, uint32_t* to) {
  int64_t panel = column / kPanel, first = column % kPanel;
  int width = w.width(panel);
  auto b = reinterpret_cast<const uint32_t*>(w.panel(panel)) + first;
  copy_column_tiles(b, width, width - first > 16, w.padded_k() / kTileK, to);
}

// All rows times the columns in [begin, end). Columns are copied when the first rows need them.
template <class T>
inline void pass_rows(const Product& p, int64_t begin, int64_t end) {
  const int64_t padded = p.w.padded_k(), unit = padded / kTileK * kStepBytes;
  const int64_t squares = div_up(end - begin, kSquareColumns);
  const int lines = int(div_up(kSquareRows, squares));
  auto columns = static_cast<char*>(scratch(kSums, squares * unit));
  auto fetch = static_cast<const char*>(p.x);
  Squares<T> all(p);
  tiles.shape(kSquareRows);
  for (int64_t row = 0; row < p.rows; row += kSquareRows) {
    fetch += unit;
    for (int64_t i = 0; i < squares; i++) {
      int64_t column = begin + i * kSquareColumns;
      auto b = reinterpret_cast<uint32_t*>(columns + i * unit);
      if (row == 0) copy_columns(p.w, column, b);
      all.add(row, column, b, fetch + i * lines * (unit / kSquareRows), lines);
    }
  }
}

// x as tiles, rows padded to whole squares.
inline const bf16* copy_rows(const Product& p, int dtype) {
  int64_t padded = p.w.padded_k(), squares = div_up(p.rows, kSquareRows);
  auto to = static_cast<bf16*>(scratch(kInput, squares * kSquareRows * padded * int64_t(sizeof(bf16))));
  with_float(dtype, [&](auto t) {
    auto x = static_cast<const decltype(t)*>(p.x);
    auto copy = [&](int64_t i, int) {
      int64_t row = i * kSquareRows, left = p.rows - row;
      copy_row_tiles(x + row * p.ldx, p.ldx, left < kSquareRows ? left : kSquareRows, p.w.k,
                     padded, to + row * padded);
    };
    parallel(squares, copy, true);
  });
  return to;
}

// A task is a group of columns. The number of groups gives all threads the same amount of work.
inline void run_many(Product p, int dtype) {
  p.x = copy_rows(p, dtype);
  int64_t fit = kColumnBytes / (p.w.padded_k() * int64_t(sizeof(bf16)));
  int64_t wanted = div_up(div_up(p.w.n, fit), threads()) * threads();
  int64_t columns = div_up(div_up(p.w.n, wanted), kSquareColumns) * kSquareColumns;
  auto work = [&](int64_t task, int) {
    int64_t begin = task * columns, end = begin + columns < p.w.n ? begin + columns : p.w.n;
    with_float(p.out_dtype, [&](auto t) { pass_rows<decltype(t)>(p, begin, end); });
    tiles.release();
  };
  parallel(div_up(p.w.n, columns), work, true);
}

}  // namespace modulm

#endif
