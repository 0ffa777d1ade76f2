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
  // The bits of codes above the fourth; lines of lanes of these bits, and of all bits, in a span.
  static constexpr int kHighBits = Format == kWeightQ4K ? 0 : Format == kWeightQ5K ? 1 : 2;
  static constexpr int kHighLines = 2 * kHighBits, kLines = kHighLines + kSpan / 8;
  static constexpr int kScaleLines = kMinima ? 3 : 4;
  static constexpr int kFloats = kMinima ? 2 : 1;
  static constexpr int kBytes = 4 * (kSpans * kLines + kScaleLines) + 2 * kFloats;
  // Lines of nibbles that share a line of high bits.
  static constexpr int kShared = kHighBits ? kSpan / 8 / kHighLines : 1;
};

// f(BlockType of the format)
template <class F>
inline void with_blocks(int format, F&& f) {
  switch (format) {
    case kWeightQ4K: return f(BlockType<kWeightQ4K>{});
    case kWeightQ5K: return f(BlockType<kWeightQ5K>{});
    default: return f(BlockType<kWeightQ6K>{});
  }
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
  // Line `i` of a span's nibbles, and of its high bits, each before the nibbles that share it.
  const uint32_t* nibbles(int span, int i) const {
    const int before = Type::kHighBits ? i / Type::kShared + 1 : 0;
    return codes + (span * Type::kLines + i + before) * width;
  }
  const uint32_t* high(int span, int i) const {
    return codes + (span * Type::kLines + i * (Type::kShared + 1)) * width;
  }

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
        const int shift = 8 * (i % 4) + 4 * (i % 8 / 4);
        const int span = i / kSpan, within = i % kSpan;
        int code = int(*parts.nibbles(span, within / 8) >> shift & 15u);
        if constexpr (Type::kHighBits > 0) {
          constexpr int wide = 8 * Type::kShared, bits = Type::kHighBits;
          const int lower = 8 * (i % 4) + bits * (i % wide / 4);
          code |= int(*parts.high(span, within / wide) >> lower & ((1u << bits) - 1)) << 4;
        }
        to[k + i] = scale * float(code - Type::kCentre) - minimum;
      }
    }
  });
}

}  // namespace modulm
