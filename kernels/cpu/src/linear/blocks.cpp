// The kernels of blocks.h's products, compiled once for linear layers and experts.
#include "linear/blocks.h"
#include "linear/codes.h"
#include "linear/register_blocks.h"
#include "linear/wide.h"

#if defined(__AMX_INT8__)
#include "linear/amx.h"
#endif

namespace modulm {
namespace {

// Lanes that prefetches of few rows run ahead, to the second-level cache and on to the first.
constexpr int kBlocksFar = 1536, kBlocksNear = 64;

// How rows of activations and codes lie: bytes and quads [k / 4][64], or numbers of 16 bits and
// squares (wide.h).
#if defined(MODULM_WIDE_PAIRS)
struct Form {
  static constexpr int kDigits = 2;  // rows of bytes of a row
  static constexpr int64_t kCodes = kPanel / kSquareColumns * kSquare;
  static int64_t stride(const Activations& a) { return a.blocks * 2 * kBlockK; }
  static const int8_t* quad(const int8_t* x, int number) { return x + 8 * number; }
  // Where the codes of a quad are, from a column on.
  static int64_t place(int quad, int64_t column) {
    return column / kSquareColumns * kSquare + quad * kSquareLine + column % kSquareColumns;
  }
  static void put(uint32_t* to, vu codes) {
    for (int p = 0; p < 2; p++)
      store_raw(to + p * kSquareColumns, wide_codes<kQuads>(codes, p, Lookup(kNoTable)));
  }
  // c += the products of a quad of codes with the rows.
  template <int Rows>
  static void add(const int8_t* quad, int64_t stride, const uint32_t* b, vi (&c)[Rows][2]) {
    wide_line<kWidened>(quad, stride, b, Lookup(kNoTable), c);
  }
  static vi minima(const vu (&both)[4], const int32_t* totals, int64_t runs) {
    return (minima_sum(both, totals) << 8) + minima_sum(both, totals + runs);
  }
};
#else
struct Form {
  static constexpr int kDigits = 1;
  static constexpr int64_t kCodes = kBlock / 4 * kPanel;
  static int64_t stride(const Activations&) { return kBlockK; }
  static const int8_t* quad(const int8_t* x, int number) { return x + 4 * number; }
  static int64_t place(int quad, int64_t column) { return quad * kPanel + column; }
  static void put(uint32_t* to, vu codes) { store_raw(to, codes); }
  template <int Rows, int Vectors>
  static void add(const int8_t* quad, int64_t stride, const uint32_t* b, vi (&c)[Rows][Vectors]) {
    vu codes[Vectors];
    for (int v = 0; v < Vectors; v++) codes[v] = load_raw<vu>(b + v * kLanes);
    for (int r = 0; r < Rows; r++) {
      const auto held = hold_quad(quad + r * stride);
      for (int v = 0; v < Vectors; v++) c[r][v] = quad_dot(c[r][v], codes[v], held);
    }
  }
  static vi minima(const vu (&both)[4], const int32_t* totals, int64_t) {
    return minima_sum(both, totals);
  }
};
#endif

// One step of a panel, converted to the form that is multiplied. It stays in the first-level cache
// for all rows.
struct alignas(64) SpreadBlocks {
  uint32_t codes[Form::kCodes];
  float scales[kBlock / kLeastGroup][kPanel];
  uint32_t minima[4][kPanel];
  float d[kPanel], least[kPanel];
};

#if !defined(MODULM_WIDE_PAIRS)
// Few rows: codes are read from memory into registers, without a buffer.
template <class Type, int Rows, int Vectors>
inline void block_rows(const Weight& w, int64_t panel, const Activations& a, int64_t row,
                       int column, float* sums) {
  constexpr int quads = Type::kGroup / 4, groups = kSpan / Type::kGroup;
  constexpr int portion = Type::kPortion / 4;
  const int64_t width = w.width(panel);
  const uint8_t* step = w.panel(panel);
  const int8_t* x = a.at(row, 0);
  const int64_t stride = Form::stride(a);
  // Two rows of formats with minima compute for longer than they read.
  constexpr bool reads = Rows == 1 || !Type::kMinima;
  const int64_t far = reads ? stream_distance(kBlocksFar) : kBlocksFar;
  const int64_t near = reads ? stream_distance(kBlocksNear) : kBlocksNear;
  auto fetch = [&](const uint32_t* p) {
    __builtin_prefetch(p + far, 0, 2);
    __builtin_prefetch(p + near);
  };
  // Scales and floats, which lie before the codes.
  auto fetch_floats = [&](const BlockParts<Type>& parts) {
    for (auto p = parts.scales; p < parts.codes; p += 64 / sizeof(*p)) fetch(p);
  };
  for (int64_t i = 0; i < a.steps; i++, step += width * Type::kBytes) {
    const int32_t* totals = totals_of<Type>(a, row, i);
    const BlockParts<Type> parts(step, width, column);
    vf part[Rows][Vectors] = {};
    fetch_floats(parts);
    for (int s = 0; s < kSpans; s++, x += Activations::kBlockStride) {
      vu scales[Vectors];
      const uint32_t* lines = parts.portion(s * (kSpan / Type::kPortion));
      for (int v = 0; v < Vectors; v++) scales[v] = parts.scales_of(s, v);
#pragma GCC unroll 4
      for (int g = 0; g < groups; g++) {
        vi c[Rows][Vectors];
        for (int r = 0; r < Rows; r++)
          for (int v = 0; v < Vectors; v++)
            c[r][v] =
                start_of_group<Type>(totals[r * a.runs + s * groups + g]);
#pragma GCC unroll 8
        for (int q = 0; q < quads; q += 2) {
          const int at = g * quads + q, within = at % portion;  // of the span's 16, of the portion
          const int known = lines_of<Type>(within), needed = lines_of<Type>(within + 2);
          auto quad = [&](int r, int h) {
            return load_quad(Form::quad(x + r * stride, at + h));
          };
          decltype(quad(0, 0)) held[Rows][2];
          for (int r = 0; r < Rows; r++)
            for (int h = 0; h < 2; h++) held[r][h] = quad(r, h);
          for (int v = 0; v < Vectors; v++) {
            for (int i = known; i < needed; i++) fetch(lines + i * width + v * kLanes);
            auto line = [&](int i) { return load_raw<vu>(lines + i * width + v * kLanes); };
            for (int h = 0; h < 2; h++) {
              const vu codes = block_codes<Type>(line, within + h);
              for (int r = 0; r < Rows; r++) {
                if constexpr (kQuadsFromMemory) c[r][v] = quad_dot(c[r][v], codes, quad(r, h));
                else c[r][v] = quad_dot(c[r][v], codes, held[r][h]);
              }
            }
            __asm__ volatile("" ::: "memory");  // else compilers group the prefetches
          }
          if (within + 2 == portion) lines += Type::kPortionLines * width;
        }
        for (int v = 0; v < Vectors; v++) {
          const vf scale = scale_of_group<Type>(scales[v], g);
          for (int r = 0; r < Rows; r++)
            part[r][v] = fused(__builtin_convertvector(c[r][v], vf), scale, part[r][v]);
        }
      }
    }
    for (int v = 0; v < Vectors; v++) {
      const vf d = load(parts.d + v * kLanes);
      vf least{};
      vu both[4];
      if constexpr (Type::kMinima) {
        least = load(parts.least + v * kLanes);
        for (int p = 0; p < 4; p++) both[p] = parts.minima_of(p, v);
      }
      for (int r = 0; r < Rows; r++) {
        vf sum = block_sum(part[r][v], d);
        if constexpr (Type::kMinima)
          sum = block_sum(part[r][v], d, Form::minima(both, totals + r * a.runs, a.runs), least);
        float* to = sums + r * kPanel + column + v * kLanes;
        store(to, fused(sum, a.scales[(row + r) * a.steps + i], load(to)));
      }
    }
  }
}

#else
// Two quads of a portion, from `quad` on: their codes meet pairs of one row.
template <class Type, int Vectors>
inline void block_quads(const int8_t* x, const uint32_t* lines, int64_t width, int quad,
                        vi (&c)[1][Vectors]) {
  __m256i pairs[4];
#pragma GCC unroll 4
  for (int p = 0; p < 4; p++) pairs[p] = load_pairs(x + 4 * p);
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; v++) {
    if (v % 2 == 0)
      for (int i = lines_of<Type>(quad); i < lines_of<Type>(quad + 2); i++) {
        __builtin_prefetch(lines + i * width + v * kLanes + kBlocksFar, 0, 2);
        __builtin_prefetch(lines + i * width + v * kLanes + kQuadsNear);
      }
    auto line = [&](int i) { return load_raw<vu>(lines + i * width + v * kLanes); };
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      const vu codes = block_codes<Type>(line, quad + h);
      add_pairs(c[0][v], (__m256i)(codes & 0x00ff00ffu), pairs[2 * h]);
      add_pairs(c[0][v], _mm256_srli_epi16((__m256i)codes, 8), pairs[2 * h + 1]);
    }
  }
}

// One row of both digits: lines of a panel as they come from memory, all sums of a group in
// registers.
template <class Type, int Vectors>
[[gnu::noinline]] void wide_block_row(const Weight& w, int64_t panel, const Activations& a,
                                      int64_t row, int column, float* sums) {
  static_assert(Type::kBits == 4 || Type::kPortion == Type::kGroup, "a group is a portion");
  const int64_t width = w.width(panel);
  const uint8_t* step = w.panel(panel);
  const int8_t* x = a.at(row, 0);
  const Lookup code_of(kNoTable);
  for (int64_t i = 0; i < a.steps; i++, step += width * Type::kBytes) {
    const int32_t* totals = totals_of<Type>(a, row, i);
    const BlockParts<Type> parts(step, width, column);
    for (auto p = parts.scales; p < parts.codes; p += 64 / sizeof(*p)) {
      __builtin_prefetch(p + kBlocksFar, 0, 2);
      __builtin_prefetch(p + kQuadsNear);
    }
    vf part[Vectors] = {};
    const uint32_t* line = parts.codes;
    for (int four = 0; four < Type::kGroups; four += 4) {
      vu scales[Vectors];  // of four groups, the next one in the lowest bytes
      for (int v = 0; v < Vectors; v++) scales[v] = parts.scales_of(four * Type::kGroup / kSpan, v);
#pragma GCC unroll 1
      for (int g = four; g < four + 4; g++) {
        vi c[1][Vectors];
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) c[0][v] = start_of_group<Type>(totals[g]);
#pragma GCC unroll 4
        for (int q = 0; q < Type::kGroup / 4; q += 2, x += 16)
          if constexpr (Type::kBits == 4)
            wide_line_of_one<kNibbles, kBlocksFar>(x, line + q / 2 * width, code_of, c);
          else block_quads<Type>(x, line, width, q, c);
        line += Type::kGroup * Type::kBits / 32 * width;
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++) {
          part[v] = fused(__builtin_convertvector(c[0][v], vf), scale_of_group<Type>(scales[v], 0),
                          part[v]);
          scales[v] >>= 8;
        }
      }
    }
    for (int v = 0; v < Vectors; v++) {
      const vf d = load(parts.d + v * kLanes);
      vf sum = block_sum(part[v], d);
      if constexpr (Type::kMinima) {
        vu both[4];
        for (int p = 0; p < 4; p++) both[p] = parts.minima_of(p, v);
        sum = block_sum(part[v], d, Form::minima(both, totals, a.runs),
                        load(parts.least + v * kLanes));
      }
      float* to = sums + column + v * kLanes;
      store(to, fused(sum, a.scales[row * a.steps + i], load(to)));
    }
  }
}

template <class Type>
inline void wide_block_panel(const Weight& w, int64_t panel, const Activations& a, int64_t row,
                             float* sums) {
  const int width = w.width(panel);
  if (width == kPanel) return wide_block_row<Type, kPanel / kLanes>(w, panel, a, row, 0, sums);
  for (int c = 0; c < width; c += 2 * kLanes) wide_block_row<Type, 2>(w, panel, a, row, c, sums);
}
#endif

template <class Type>
inline void spread_blocks(const uint8_t* step, int64_t width, SpreadBlocks& to) {
  constexpr int quads = Type::kPortion / 4;
  const BlockParts<Type> all(step, width, 0);
  for (int i = 0; i < kBlock / Type::kPortion; i++)
    for (int64_t c = 0; c < width; c += kLanes) {
      const uint32_t* lines = all.portion(i) + c;
      auto line = [&](int number) { return load_raw<vu>(lines + number * width); };
#pragma GCC unroll 8
      for (int q = 0; q < quads; q++)
        Form::put(to.codes + Form::place(quads * i + q, c), block_codes<Type>(line, q));
    }
  constexpr int groups = kSpan / Type::kGroup;
  for (int64_t c = 0; c < width; c += kLanes) {
    const BlockParts<Type> parts(step, width, int(c));
    for (int s = 0; s < kSpans; s++) {
      const vu scales = parts.scales_of(s, 0);
      for (int g = 0; g < groups; g++)
        store(&to.scales[s * groups + g][c], scale_of_group<Type>(scales, g));
    }
    store(&to.d[c], load(parts.d));
    if constexpr (Type::kMinima) {
      for (int p = 0; p < 4; p++) store_raw(&to.minima[p][c], parts.minima_of(p, 0));
      store(&to.least[c], load(parts.least));
    }
  }
}

// The end of a step for some rows and vectors: `sums` are those of the first row and column.
template <class Type, int Rows, int Vectors>
inline void add_block(const SpreadBlocks& b, const vf (&part)[Rows][Vectors], const Activations& a,
                      int64_t row, int64_t step, int column, float* sums) {
  const int32_t* totals = totals_of<Type>(a, row, step);
  for (int v = 0; v < Vectors; v++) {
    const int c = column + v * kLanes;
    const vf d = load(&b.d[c]);
    vf least{};
    vu both[4];
    if constexpr (Type::kMinima) {
      least = load(&b.least[c]);
      for (int p = 0; p < 4; p++) both[p] = load_raw<vu>(&b.minima[p][c]);
    }
    for (int r = 0; r < Rows; r++) {
      const int64_t digit = Form::kDigits * r;
      vf sum = block_sum(part[r][v], d);
      if constexpr (Type::kMinima)
        sum = block_sum(part[r][v], d, Form::minima(both, totals + digit * a.runs, a.runs), least);
      float* to = sums + r * kPanel + c;
      store(to, fused(sum, a.scales[(row + digit) * a.steps + step], load(to)));
    }
  }
}

// Rows times Vectors * kLanes columns of one step.
template <class Type, int Rows, int Vectors>
[[gnu::noinline]] void block_tile(const SpreadBlocks& b, const Activations& a, int64_t row,
                                  const int8_t* x, int64_t step, int column, Ahead& next,
                                  float* sums) {
  constexpr int quads = Type::kGroup / 4, groups = kSpan / Type::kGroup;
  const int32_t* totals = totals_of<Type>(a, row, step);
  const int64_t stride = Form::stride(a);
  vf part[Rows][Vectors] = {};
  for (int s = 0; s < kSpans; s++, x += Activations::kBlockStride) {
    next.fetch();
#pragma GCC unroll 4
    for (int g = 0; g < groups; g++) {
      const int run = s * groups + g;
      vi c[Rows][Vectors];
#pragma GCC unroll 8
      for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; v++)
          c[r][v] = start_of_group<Type>(totals[Form::kDigits * r * a.runs + run]);
#pragma GCC unroll 8
      for (int q = 0; q < quads; q++)
        Form::add(Form::quad(x, g * quads + q), stride,
                  b.codes + Form::place(run * quads + q, column), c);
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; v++) {
        const vf scale = load(&b.scales[run][column + v * kLanes]);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; r++)
          part[r][v] = fused(__builtin_convertvector(c[r][v], vf), scale, part[r][v]);
      }
    }
  }
  add_block<Type>(b, part, a, row, step, column, sums);
}

// The columns from `c` to `width`.
template <class Type, int Rows>
inline void block_columns(const SpreadBlocks& b, const Activations& a, int64_t row, int64_t step,
                          int c, int width, Ahead& next, float* sums) {
  const int8_t* x = a.at(row, 0) + step * kSpans * Activations::kBlockStride;
  for (; c + 2 * kLanes <= width; c += 2 * kLanes)
    block_tile<Type, Rows, 2>(b, a, row, x, step, c, next, sums);
  if constexpr (Form::kDigits == 1)
    for (; c < width; c += kLanes)
      block_tile<Type, Rows, 1>(b, a, row, x, step, c, next, sums);
}

#if defined(__AMX_INT8__)
// Vectors * 16 columns of one step on tiles: each group's sums, then the same as above.
template <class Type, int Vectors>
inline void tiled_blocks(const SpreadBlocks& b, const Activations& a, int64_t row, int rows,
                         int64_t step, int column, float* sums) {
  constexpr int columns = Vectors * kLanes;
  alignas(64) int32_t dots[Type::kGroups * kIntegerRows * columns];
  for (int g = 0; g < Type::kGroups; g++) {
    QuadTiles q{a.at(row, step * kBlock + g * Type::kGroup), Activations::kBlockStride,
                a.blocks * Activations::kBlockStride,
                b.codes + Form::place(g * Type::kGroup / 4, column), kPanel, Type::kGroup, 1, false};
    amx_quads<Vectors, false>(q, rows, dots + g * kIntegerRows * columns);
  }
  for (int r = 0; r < rows; r++) {
    const int32_t* totals = totals_of<Type>(a, row + r, step);
    vf part[1][Vectors] = {};
    for (int g = 0; g < Type::kGroups; g++) {
      const int32_t* from = dots + (g * kIntegerRows + r) * columns;
      for (int v = 0; v < Vectors; v++) {
        vi dot = load_raw<vi>(from + v * kLanes);
        if (Type::kCentre) dot += totals[g];
        const vf scale = load(&b.scales[g][column + v * kLanes]);
        part[0][v] = fused(__builtin_convertvector(dot, vf), scale, part[0][v]);
      }
    }
    add_block<Type>(b, part, a, row + r, step, column, sums + r * kPanel);
  }
}
#endif

// sums[rows][64] += rows from `row` on times one step, the columns from `c` to `width`; rows: 1 to
// kIntegerRows, or kWideRows.
template <class Type>
inline void block_step(const SpreadBlocks& b, const Activations& a, int64_t row, int rows,
                       int64_t step, int c, int width, Ahead& next, float* sums) {
#if defined(__AMX_INT8__)
  if (rows > kQuadRows) {
    tiles.shape(rows, Type::kGroup);
    for (int i = 0; i < 16; i++) next.fetch();
    if (rows <= 16 && width == kPanel) return tiled_blocks<Type, 4>(b, a, row, rows, step, 0, sums);
    if (rows > 16)
      for (; c + 32 <= width; c += 32) tiled_blocks<Type, 2>(b, a, row, rows, step, c, sums);
    for (; c < width; c += 16) tiled_blocks<Type, 1>(b, a, row, rows, step, c, sums);
    return;
  }
#endif
  switch (rows) {
    case 1: return block_columns<Type, 1>(b, a, row, step, c, width, next, sums);
    case 2: return block_columns<Type, 2>(b, a, row, step, c, width, next, sums);
#if defined(MODULM_MANY_REGISTERS) || defined(MODULM_WIDE_PAIRS)
    case 3: return block_columns<Type, 3>(b, a, row, step, c, width, next, sums);
    case 4: return block_columns<Type, 4>(b, a, row, step, c, width, next, sums);
#endif
#if defined(MODULM_QUAD_DOT) || defined(MODULM_WIDE_PAIRS)
    case 5: return block_columns<Type, 5>(b, a, row, step, c, width, next, sums);
    case 6: return block_columns<Type, 6>(b, a, row, step, c, width, next, sums);
#endif
  }
}

#if !defined(MODULM_WIDE_PAIRS)
template <class Type, int Rows>
inline void block_panel(const Weight& w, int64_t panel, const Activations& a, int64_t row,
                        float* sums) {
  const int width = w.width(panel);
  int c = 0;
  for (; c + 4 * kLanes <= width; c += 4 * kLanes)
    block_rows<Type, Rows, 4>(w, panel, a, row, c, sums);
  for (; c < width; c += kLanes) block_rows<Type, Rows, 1>(w, panel, a, row, c, sums);
}

#endif

}  // namespace

#if defined(MODULM_WIDE_PAIRS)
void block_sums(const Weight& w, int64_t panel, const Activations& a, int64_t row, int64_t digits,
                float* sums) {
  with_blocks(w.format, [&](auto type) {
    using Type = decltype(type);
    const int width = w.width(panel);
    const int64_t rows = digits / 2, bytes = width * Type::kBytes;
    if (rows == 1) return wide_block_panel<Type>(w, panel, a, row, sums);
    auto& spread = *static_cast<SpreadBlocks*>(scratch(kDecoded, sizeof(SpreadBlocks)));
    const uint8_t* from = w.panel(panel);
    const int64_t blocks = div_up(rows, kWideRows);
    for (int64_t step = 0; step < a.steps; step++, from += bytes) {
      spread_blocks<Type>(from, width, spread);
      Ahead next(from + bytes, bytes, blocks * (width / kSquareColumns) * kSpans);
      // Two squares at a time stay in the first-level cache.
      for (int c = 0, end; c < width; c = end) {
        end = c + 2 * kSquareColumns < width ? c + 2 * kSquareColumns : width;
        for_row_blocks(rows, int(div_up(rows, blocks)), [&](int64_t r, int n) {
          block_step<Type>(spread, a, row + 2 * r, n, step, c, end, next, sums + r * kPanel);
        });
      }
    }
  });
}
#else
void block_sums(const Weight& w, int64_t panel, const Activations& a, int64_t row, int64_t rows,
                float* sums) {
  with_blocks(w.format, [&](auto type) {
    using Type = decltype(type);
    if (rows == 1) return block_panel<Type, 1>(w, panel, a, row, sums);
    if (rows == 2) return block_panel<Type, 2>(w, panel, a, row, sums);
#if defined(MODULM_REGISTER_BLOCKS)
    if (rows >= kRegisterFrom && w.width(panel) == kPanel)
      return register_panel<Type>(w, panel, a, row, rows, sums);
#endif
    auto& spread = *static_cast<SpreadBlocks*>(scratch(kDecoded, sizeof(SpreadBlocks)));
    const int width = w.width(panel);
    const uint8_t* from = w.panel(panel);
    for (int64_t step = 0; step < a.steps; step++, from += width * Type::kBytes) {
      spread_blocks<Type>(from, width, spread);
      const int64_t bytes = width * Type::kBytes, tiles = div_up(rows, kQuadRows) * (width / 32);
      Ahead next(from + bytes, bytes, tiles * kSpans);
      for_row_blocks(rows, kIntegerRows, [&](int64_t r, int n) {
        block_step<Type>(spread, a, row + r, n, step, 0, width, next, sums + r * kPanel);
      });
    }
  });
}
#endif

}  // namespace modulm
