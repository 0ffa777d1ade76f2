// Products of integer activations with blocks of 256 weights, as in ggml's K types.
//
// A weight is d * scale * (code - centre) - least * minimum, scale and minimum being whole numbers
// of a group of 16 or 32 k, d and least floats of a column's step of 256. Activations have one
// scale for the step: within it products of a group are summed exactly in int32, groups are added
// in fp32 in the order of k, minima times the sums of activations in int32, steps in fp32 in order.
// A row therefore gets the same bits whichever kernel computes it.
#pragma once

#include "linear/integer.h"

namespace modulm {

constexpr int64_t kBlock = kStep;                      // k of a block
constexpr int kSpan = kBlockK, kSpans = kBlock / kSpan;  // k whose codes lie together

template <int Format>
struct BlockType {
  static constexpr bool kMinima = Format != kWeightQ6K;
  static constexpr int kGroup = kMinima ? 32 : 16;
  static constexpr int kGroups = kBlock / kGroup;
  static constexpr int kCentre = kMinima ? 0 : kCentreQ6K;
  static constexpr int kBits = Format == kWeightQ4K ? 4 : Format == kWeightQ5K ? 5 : 6;
  // k whose codes are found in lines of lanes of their own, four k in a quad, and all lines of a span.
  static constexpr int kPortion = kBits == 4 ? 8 : kBits == 5 ? 32 : 16;
  static constexpr int kPortionLines = kPortion * kBits / 32, kLines = kSpan * kBits / 32;
  static constexpr int kScaleLines = kMinima ? 3 : 4;
  static constexpr int kFloats = kMinima ? 2 : 1;
  static constexpr int kBytes = 4 * (kSpans * kLines + kScaleLines) + 2 * kFloats;
};

// a where the mask has ones, else b.
inline uint32_t merged(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }
inline vu merged(uint32_t mask, vu a, vu b) {
#if defined(__AVX512F__)
  const __m512i bits = _mm512_set1_epi32(int(mask));
  return (vu)_mm512_ternarylogic_epi32(bits, (__m512i)a, (__m512i)b, 0xca);
#else
  return (a & mask) | (b & ~mask);
#endif
}

// The codes of a quad of a portion, a byte each. line(i): line `i` of the portion, lanes or one lane.
template <class Type, class F>
[[gnu::always_inline]] inline auto block_codes(F&& line, int quad) {
  constexpr uint32_t nibbles = 0x0f0f0f0fu, six = 0x3f3f3f3fu;
  if constexpr (Type::kBits == 6) {
    if (quad < 3) return line(quad) & six;
    const auto four = merged(0x03030303u, line(0) >> 6, line(1) >> 4);
    return merged(nibbles, four, line(2) >> 2) & six;
  } else {
    const auto both = line(Type::kPortionLines - Type::kPortion / 8 + quad / 2);
    const auto low = (quad % 2 ? both >> 4 : both) & nibbles;
    if constexpr (Type::kBits == 4) return low;
    else return low | ((quad < 4 ? line(0) << (4 - quad) : line(0) >> (quad - 4)) & 0x10101010u);
  }
}

// f(BlockType of the format)
template <class F>
inline void with_blocks(int format, F&& f) {
  switch (format) {
    case kWeightQ4K: return f(BlockType<kWeightQ4K>{});
    case kWeightQ5K: return f(BlockType<kWeightQ5K>{});
    default: return f(BlockType<kWeightQ6K>{});
  }
}

// How many lines of a portion its first quads use.
template <class Type>
constexpr int lines_of(int quads) {
  if (quads == 0) return 0;
  return Type::kBits == 6 ? (quads < 4 ? quads : 3) : (Type::kBits == 5) + (quads + 1) / 2;
}

// Addresses of the parts of a panel's blocks of one step, from one column on.
template <class Type>
struct BlockParts {
  const uint32_t *scales, *codes;
  const fp16 *d, *least;
  int64_t width;

  BlockParts(const uint8_t* step, int64_t width, int column) : width(width) {
    scales = reinterpret_cast<const uint32_t*>(step) + column;
    d = reinterpret_cast<const fp16*>(scales - column + Type::kScaleLines * width) + column;
    least = d + width;
    codes = reinterpret_cast<const uint32_t*>(d - column + Type::kFloats * width) + column;
  }
  // The lines of portion `i` of the step.
  const uint32_t* portion(int i) const { return codes + i * Type::kPortionLines * width; }

  // Scales of the groups of span `s` of kSpan k, from the lowest byte on; vector `v`.
  vu scales_of(int s, int v) const {
    auto line = [&](int i) { return load_raw<vu>(scales + i * width + v * kLanes); };
    if constexpr (!Type::kMinima) return line(s);
    vu first = line(0);
    if (s >= 2) first = (line(2) & 0x0f0f0f0fu) | (first >> 2 & 0x30303030u);
    else first &= 0x3f3f3f3fu;
    return s % 2 ? first >> 16 : first;
  }
  // Minima of groups (0, 2), (1, 3), (4, 6), (5, 7), side by side in the halves of lanes.
  vu minima_of(int pair, int v) const {
    auto line = [&](int i) { return load_raw<vu>(scales + i * width + v * kLanes); };
    vu four = line(1);
    if (pair >= 2) four = (line(2) >> 4 & 0x0f0f0f0fu) | (four >> 2 & 0x30303030u);
    else four &= 0x3f3f3f3fu;
    return (pair % 2 ? four >> 8 : four) & 0x00ff00ffu;
  }
};

// Scale number `g` of a span.
template <class Type>
inline vf scale_of_group(vu scales, int g) {
  if constexpr (Type::kMinima) return __builtin_convertvector((vi)(scales >> (8 * g) & 0xffu), vf);
  return __builtin_convertvector((vi)(scales << (24 - 8 * g)) >> 24, vf);
}

// The sum of a step, without the scale of the activations.
inline vf block_sum(vf part, vf d) { return part * d; }
inline vf block_sum(vf part, vf d, vi minima, vf least) {
  return fused(least, -__builtin_convertvector(minima, vf), part * d);
}

// Of one row and step where each group's sum begins; of formats with minima the sums of activations
// in 16 bits, in the order of minima_of.
template <class Type>
inline const int32_t* totals_of(const Activations& a, int64_t row, int64_t step) {
  return a.sums + row * a.runs + step * (Type::kMinima ? Type::kGroups / 2 : Type::kGroups);
}

// The first value of a group's sum: what the centre of its codes contributes, subtracted.
template <class Type>
inline vi start_of_group(int32_t start) {
  return Type::kCentre ? splat_int(start) : vi{};
}

// Of a step the minima of a row's groups times the sums of its codes, in the order of minima_of.
inline vi minima_sum(const vu (&both)[4], const int32_t* totals) {
  vi sum{};
  for (int p = 0; p < 4; p++) sum = pair_dot(sum, both[p], uint32_t(totals[p]));
  return sum;
}

// Like `integer_sums`, for weights in blocks.
void block_sums(const Weight& w, int64_t panel, const Activations& a, int64_t row, int64_t rows,
                float* sums);

// One column as floats, bit for bit as in ggml.
inline void block_column(const Weight& w, int64_t column, float* to) {
  with_blocks(w.format, [&](auto type) {
    using Type = decltype(type);
    const int64_t panel = column / kPanel, width = w.width(panel);
    const uint8_t* step = w.panel(panel);
    for (int64_t k = 0; k < w.k; k += kBlock, step += width * Type::kBytes) {
      const BlockParts<Type> parts(step, width, int(column % kPanel));
      auto byte = [&](int line, int b) {
        return int(parts.scales[line * width] >> (8 * b) & 0xffu);
      };
      const float d = load_one(parts.d), least = Type::kMinima ? load_one(parts.least) : 0.0f;
      float scale = 0, minimum = 0;
      for (int i = 0; i < kBlock; i++) {
        const int g = i / Type::kGroup;
        if (i % Type::kGroup == 0 && !Type::kMinima) {
          scale = d * float(int8_t(byte(g / 4, g % 4)));
        } else if (i % Type::kGroup == 0) {
          const bool low = g < 4;
          const int b = g % 4, rest = byte(2, b);
          scale = d * float(low ? byte(0, b) & 63 : (rest & 15) | (byte(0, b) >> 2 & 48));
          minimum = least * float(low ? byte(1, b) & 63 : rest >> 4 | (byte(1, b) >> 2 & 48));
        }
        const uint32_t* lines = parts.portion(i / Type::kPortion);
        const auto line = [&](int number) { return lines[number * width]; };
        const uint32_t quad = block_codes<Type>(line, i % Type::kPortion / 4);
        const int code = int(quad >> 8 * (i % 4) & 0xffu);
        to[k + i] = scale * float(code - Type::kCentre) - minimum;
      }
    }
  });
}

}  // namespace modulm
