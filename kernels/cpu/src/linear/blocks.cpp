// The kernels of blocks.h's products, compiled once for linear layers and experts.
#include "linear/blocks.h"
#include "linear/codes.h"

#if defined(__AMX_INT8__)
#include "linear/amx.h"
#endif

namespace modulm {
namespace {

// Lanes that prefetches of few rows run ahead, to the second-level cache and on to the first.
constexpr int kBlocksFar = 1536, kBlocksNear = 64;

// Scale number `g` of a span.
template <class Type>
inline vf scale_of_group(vu scales, int g) {
  if constexpr (Type::kMinima) return __builtin_convertvector((vi)(scales >> (8 * g) & 0xffu), vf);
  return __builtin_convertvector((vi)(scales << (24 - 8 * g)) >> 24, vf);
}

// The codes of a quad: the low or high nibbles of a line, and the high bits of quad `which`.
template <class Type>
inline vu block_codes(vu line, vu high, bool upper, int which) {
  vu low = (upper ? line >> 4 : line) & 0x0f0f0f0fu;
  if constexpr (Type::kHighBits == 0) return low;
  constexpr uint32_t mask = Type::kHighBits == 1 ? 0x10101010u : 0x30303030u;
  const int shift = 4 - Type::kHighBits * which;
  return low | ((shift > 0 ? high << shift : high >> -shift) & mask);
}

// The sum of a step, without the scale of the activations.
inline vf block_sum(vf part, vf d) { return part * d; }
inline vf block_sum(vf part, vf d, vi minima, vf least) {
  return fused(least, -__builtin_convertvector(minima, vf), part * d);
}

// Of one row and step the sums of activations in each group; of formats with minima in 16 bits, in
// the order of minima_of.
template <class Type>
inline const int32_t* totals_of(const Activations& a, int64_t row, int64_t step) {
  return a.sums + row * a.runs + step * (Type::kMinima ? Type::kGroups / 2 : Type::kGroups);
}

// The first value of a group's sum: what the centre of its codes contributes, subtracted.
template <class Type>
inline vi start_of_group(int32_t total) {
  return Type::kCentre ? splat_int(-Type::kCentre * total) : vi{};
}

// How rows of activations lie, and what a kernel's row is: a digit, or both digits of a row as
// numbers of 16 bits (wide.h).
struct Digits {
  static constexpr int kDigits = 1;
  static int64_t stride(const Activations&) { return kBlockK; }
  static const int8_t* quad(const int8_t* x, int number) { return x + 4 * number; }
  static auto load(const int8_t* quad) { return load_quad(quad); }
  static auto hold(const int8_t* quad) { return hold_quad(quad); }
  static vi minima(const vu (&both)[4], const int32_t* totals, int64_t) {
    vi sum{};
    for (int p = 0; p < 4; p++) sum = pair_dot(sum, both[p], uint32_t(totals[p]));
    return sum;
  }
};
struct BothDigits {
  static constexpr int kDigits = 2;
  static int64_t stride(const Activations& a) { return a.blocks * 2 * kBlockK; }
  static const int8_t* quad(const int8_t* x, int number) { return x + 8 * number; }
  static auto load(const int8_t* quad) { return load_wide_quad(quad); }
  static auto hold(const int8_t* quad) { return load_wide_quad(quad); }
  static vi minima(const vu (&both)[4], const int32_t* totals, int64_t runs) {
    return (Digits::minima(both, totals, runs) << 8) + Digits::minima(both, totals + runs, runs);
  }
};

// Few rows: codes are read from memory into registers, without a buffer.
template <class Type, class Form, int Rows, int Vectors>
inline void block_rows(const Weight& w, int64_t panel, const Activations& a, int64_t row,
                       int column, float* sums) {
  constexpr int quads = Type::kGroup / 4, groups = kSpan / Type::kGroup;
  const int64_t width = w.width(panel);
  const uint8_t* step = w.panel(panel);
  const int8_t* x = a.at(row, 0);
  const int64_t stride = Form::stride(a);
  auto fetched = [](const uint32_t* p) {
    __builtin_prefetch(p + kBlocksFar, 0, 2);
    __builtin_prefetch(p + kBlocksNear);
    return load_raw<vu>(p);
  };
  // Scales and floats, which lie before the codes.
  auto fetch_floats = [&](const BlockParts<Type>& parts) {
    for (auto p = parts.scales; p < parts.codes; p += 64 / sizeof(*p)) {
      __builtin_prefetch(p + kBlocksFar, 0, 2);
      __builtin_prefetch(p + kBlocksNear);
    }
  };
  for (int64_t i = 0; i < a.steps; i++, step += width * Type::kBytes) {
    const int32_t* totals = totals_of<Type>(a, row, i);
    const BlockParts<Type> parts(step, width, column);
    vf part[Rows][Vectors] = {};
    fetch_floats(parts);
    for (int s = 0; s < kSpans; s++, x += Activations::kBlockStride) {
      vu scales[Vectors], high[Vectors] = {};
      const uint32_t* line = parts.codes + s * Type::kLines * width;
      for (int v = 0; v < Vectors; v++) scales[v] = parts.scales_of(s, v);
#pragma GCC unroll 4
      for (int g = 0; g < groups; g++) {
        vi c[Rows][Vectors];
        for (int r = 0; r < Rows; r++)
          for (int v = 0; v < Vectors; v++)
            c[r][v] =
                start_of_group<Type>(totals[Form::kDigits * r * a.runs + s * groups + g]);
#pragma GCC unroll 8
        for (int q = 0; q < quads; q += 2) {
          const int at = g * quads + q;  // of the span's 16
          const bool more = Type::kHighBits && at % (2 * Type::kShared) == 0;
          if (more) {
            for (int v = 0; v < Vectors; v++) high[v] = fetched(line + v * kLanes);
            line += width;
          }
          auto quad = [&](int r, int h) {
            return Form::load(Form::quad(x + r * stride, at + h));
          };
          decltype(quad(0, 0)) held[Rows][2];
          for (int r = 0; r < Rows; r++)
            for (int h = 0; h < 2; h++) held[r][h] = quad(r, h);
          for (int v = 0; v < Vectors; v++) {
            const vu nibbles = fetched(line + v * kLanes);
            for (int h = 0; h < 2; h++) {
              const int which = (at + h) % (2 * Type::kShared);
              const vu codes = block_codes<Type>(nibbles, high[v], h, which);
              for (int r = 0; r < Rows; r++) {
                if constexpr (kQuadsFromMemory) c[r][v] = quad_dot(c[r][v], codes, quad(r, h));
                else c[r][v] = quad_dot(c[r][v], codes, held[r][h]);
              }
            }
            __asm__ volatile("" ::: "memory");  // else compilers group the prefetches
          }
          line += width;
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
        const int64_t digit = Form::kDigits * r;
        vf sum = block_sum(part[r][v], d);
        if constexpr (Type::kMinima)
          sum = block_sum(part[r][v], d, Form::minima(both, totals + digit * a.runs, a.runs),
                          least);
        float* to = sums + digit * kPanel + column + v * kLanes;
        store(to, fused(sum, a.scales[(row + digit) * a.steps + i], load(to)));
      }
    }
  }
}

// One step of a panel, converted to the form that is multiplied. It stays in the first-level cache
// for all rows.
struct alignas(64) SpreadBlocks {
  uint32_t quads[kBlock / 4][kPanel];
  float scales[kBlock / kLeastGroup][kPanel];
  uint32_t minima[4][kPanel];
  float d[kPanel], least[kPanel];
};

template <class Type>
inline void spread_blocks(const uint8_t* step, int64_t width, SpreadBlocks& to) {
  constexpr int lines = Type::kShared;  // of nibbles at a time
  const BlockParts<Type> all(step, width, 0);
  for (int i = 0; i < 32; i += lines)
    for (int64_t c = 0; c < width; c += kLanes) {
      const int span = i / 8, within = i % 8;
      vu high{};
      if (Type::kHighBits) high = load_raw<vu>(all.high(span, within / lines) + c);
#pragma GCC unroll 4
      for (int l = 0; l < lines; l++) {
        const vu line = load_raw<vu>(all.nibbles(span, within + l) + c);
        store_raw(&to.quads[2 * (i + l)][c], block_codes<Type>(line, high, false, 2 * l));
        store_raw(&to.quads[2 * (i + l) + 1][c], block_codes<Type>(line, high, true, 2 * l + 1));
      }
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
template <class Type, class Form, int Rows, int Vectors>
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
      float* to = sums + digit * kPanel + c;
      store(to, fused(sum, a.scales[(row + digit) * a.steps + step], load(to)));
    }
  }
}

// Rows times Vectors * kLanes columns of one step.
template <class Type, class Form, int Rows, int Vectors>
inline void block_tile(const SpreadBlocks& b, const Activations& a, int64_t row, const int8_t* x,
                       int64_t step, int column, Ahead& next, float* sums) {
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
      for (int r = 0; r < Rows; r++)
        for (int v = 0; v < Vectors; v++)
          c[r][v] = start_of_group<Type>(totals[Form::kDigits * r * a.runs + run]);
#pragma GCC unroll 8
      for (int q = 0; q < quads; q++) {
        vu codes[Vectors];
        for (int v = 0; v < Vectors; v++)
          codes[v] = load_raw<vu>(&b.quads[run * quads + q][column + v * kLanes]);
        for (int r = 0; r < Rows; r++) {
          auto quad = Form::hold(Form::quad(x + r * stride, g * quads + q));
          for (int v = 0; v < Vectors; v++) c[r][v] = quad_dot(c[r][v], codes[v], quad);
        }
      }
      for (int v = 0; v < Vectors; v++) {
        const vf scale = load(&b.scales[run][column + v * kLanes]);
        for (int r = 0; r < Rows; r++)
          part[r][v] = fused(__builtin_convertvector(c[r][v], vf), scale, part[r][v]);
      }
    }
  }
  add_block<Type, Form>(b, part, a, row, step, column, sums);
}

template <class Type, class Form, int Rows>
inline void block_columns(const SpreadBlocks& b, const Activations& a, int64_t row, int64_t step,
                          int width, Ahead& next, float* sums) {
  const int8_t* x = a.at(row, 0) + step * kSpans * Activations::kBlockStride;
  int c = 0;
  for (; c + 2 * kLanes <= width; c += 2 * kLanes)
    block_tile<Type, Form, Rows, 2>(b, a, row, x, step, c, next, sums);
  for (; c < width; c += kLanes) block_tile<Type, Form, Rows, 1>(b, a, row, x, step, c, next, sums);
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
                a.blocks * Activations::kBlockStride, &b.quads[g * Type::kGroup / 4][column],
                kPanel, Type::kGroup, 1, false};
    amx_quads<Vectors, false>(q, rows, dots + g * kIntegerRows * columns);
  }
  for (int r = 0; r < rows; r++) {
    const int32_t* totals = totals_of<Type>(a, row + r, step);
    vf part[1][Vectors] = {};
    for (int g = 0; g < Type::kGroups; g++) {
      const int32_t* from = dots + (g * kIntegerRows + r) * columns;
      for (int v = 0; v < Vectors; v++) {
        vi dot = load_raw<vi>(from + v * kLanes);
        if (Type::kCentre) dot -= Type::kCentre * totals[g];
        const vf scale = load(&b.scales[g][column + v * kLanes]);
        part[0][v] = fused(__builtin_convertvector(dot, vf), scale, part[0][v]);
      }
    }
    add_block<Type, Digits>(b, part, a, row + r, step, column, sums + r * kPanel);
  }
}
#endif

// sums[rows][64] += rows from `row` on times one step; rows: 1 to kIntegerRows.
template <class Type>
inline void block_step(const SpreadBlocks& b, const Activations& a, int64_t row, int rows,
                       int64_t step, int width, Ahead& next, float* sums) {
#if defined(__AMX_INT8__)
  if (rows > kQuadRows) {
    tiles.shape(rows, Type::kGroup);
    for (int i = 0; i < 16; i++) next.fetch();
    int c = 0;
    if (rows <= 16 && width == kPanel) return tiled_blocks<Type, 4>(b, a, row, rows, step, 0, sums);
    if (rows > 16)
      for (; c + 32 <= width; c += 32) tiled_blocks<Type, 2>(b, a, row, rows, step, c, sums);
    for (; c < width; c += 16) tiled_blocks<Type, 1>(b, a, row, rows, step, c, sums);
    return;
  }
#endif
  switch (rows) {
    case 1: return block_columns<Type, Digits, 1>(b, a, row, step, width, next, sums);
    case 2: return block_columns<Type, Digits, 2>(b, a, row, step, width, next, sums);
#if defined(MODULM_MANY_REGISTERS)
    case 3: return block_columns<Type, Digits, 3>(b, a, row, step, width, next, sums);
    case 4: return block_columns<Type, Digits, 4>(b, a, row, step, width, next, sums);
#endif
#if defined(MODULM_QUAD_DOT)
    case 5: return block_columns<Type, Digits, 5>(b, a, row, step, width, next, sums);
    case 6: return block_columns<Type, Digits, 6>(b, a, row, step, width, next, sums);
#endif
  }
}

// The same for rows of both digits; rows: 1 to kWideRows.
template <class Type>
inline void wide_step(const SpreadBlocks& b, const Activations& a, int64_t row, int rows,
                      int64_t step, int width, Ahead& next, float* sums) {
  switch (rows) {
    case 1: return block_columns<Type, BothDigits, 1>(b, a, row, step, width, next, sums);
    case 2: return block_columns<Type, BothDigits, 2>(b, a, row, step, width, next, sums);
    case 3: return block_columns<Type, BothDigits, 3>(b, a, row, step, width, next, sums);
    case 4: return block_columns<Type, BothDigits, 4>(b, a, row, step, width, next, sums);
  }
}

template <class Type, class Form, int Rows>
inline void block_panel(const Weight& w, int64_t panel, const Activations& a, int64_t row,
                        float* sums) {
  const int width = w.width(panel);
  int c = 0;
  for (; c + 4 * kLanes <= width; c += 4 * kLanes)
    block_rows<Type, Form, Rows, 4>(w, panel, a, row, c, sums);
  for (; c < width; c += kLanes) block_rows<Type, Form, Rows, 1>(w, panel, a, row, c, sums);
}

}  // namespace

void block_sums(const Weight& w, int64_t panel, const Activations& a, int64_t row, int64_t rows,
                float* sums) {
  with_blocks(w.format, [&](auto type) {
    using Type = decltype(type);
    const bool wide = wide_digits(w);
    if constexpr (kWideDigits)
      if (wide && rows == 2) return block_panel<Type, BothDigits, 1>(w, panel, a, row, sums);
    if (rows == 1) return block_panel<Type, Digits, 1>(w, panel, a, row, sums);
    if (rows == 2) return block_panel<Type, Digits, 2>(w, panel, a, row, sums);
    auto& spread = *static_cast<SpreadBlocks*>(scratch(kDecoded, sizeof(SpreadBlocks)));
    const int width = w.width(panel);
    const uint8_t* from = w.panel(panel);
    for (int64_t step = 0; step < a.steps; step++, from += width * Type::kBytes) {
      spread_blocks<Type>(from, width, spread);
      const int most = wide ? 2 * kWideRows : kIntegerRows;
      const int64_t bytes = width * Type::kBytes;
      const int64_t tiles = div_up(rows, wide ? most : kQuadRows) * (width / 32);
      Ahead next(from + bytes, bytes, tiles * (kSpans));
      for (int64_t r = 0; r < rows; r += most) {
        const int64_t n = rows - r < most ? rows - r : most;
        if constexpr (kWideDigits)
          if (wide) {
            wide_step<Type>(spread, a, row + r, int(n / 2), step, width, next, sums + r * kPanel);
            continue;
          }
        block_step<Type>(spread, a, row + r, int(n), step, width, next,
                         sums + r * kPanel);
      }
    }
  });
}

}  // namespace modulm
