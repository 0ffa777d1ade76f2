// The packed weights of a layer's experts: [experts][parts] matrices [N, K] one after the other.
//
// Each is laid out in panels as linear/weight.h says of bf16: columns in panels of 64, N padded to
// 16 and K to 32 with zeros, two successive k of one column in one 32-bit lane.
//
//   bf16    [panel][K / 2][width][2]
//   int8    the same with a byte each, fp32 scales [N]
//   int4    [panel][K / 8][width][8 nibbles], nibble j of the 32-bit lane being k = 2 j for j < 4
//           and k = 2 (j - 4) + 1 for j >= 4; bf16 scales and zeros [panel][K / group][width]
//   mxfp4   nibbles as in int4, holding e2m1 numbers; scales [panel][K / 32][width] are bytes, each
//           an exponent of 2 plus 127 (OCP Microscaling Formats, version 1.0)
//   fp32, fp16   [panel][K][width], as they are; activations are fp32 then
//
// A weight is scale * (code - zero); a nibble of int4 stands for the code nibble - 8.
#pragma once

#include "linear/weight.h"

namespace modulm {

enum StackFormat : int {
  kStackBF16 = 0,
  kStackInt8 = 1,
  kStackInt4 = 2,
  kStackMXFP4 = 3,
  kStackFP32 = 4,
  kStackFP16 = 5,
};

constexpr int64_t kMXBlock = 32;
constexpr int64_t kStackPadK = 32;

struct Stack {
  const uint8_t* data;
  const uint8_t* scales;
  const bf16* zeros;  // int4 only
  int64_t experts;
  int64_t parts;
  int64_t n, k;   // of one part
  int64_t group;  // int4 only, a multiple of 32
  int format;

  int64_t padded_k() const { return div_up(k, kStackPadK) * kStackPadK; }
  int64_t padded_n() const { return div_up(n, 16) * 16; }
  int64_t panels() const { return div_up(n, kPanel); }
  int64_t groups() const { return div_up(padded_k(), group); }
  int width(int64_t panel) const {
    int64_t left = padded_n() - panel * kPanel;
    return left < kPanel ? int(left) : kPanel;
  }
  int bits() const {
    switch (format) {
      case kStackFP32: return 32;
      case kStackBF16:
      case kStackFP16: return 16;
      case kStackInt8: return 8;
      default: return 4;
    }
  }
  bool wide() const { return format == kStackFP32 || format == kStackFP16; }
  // Bytes of an activation that these weights are multiplied by.
  int64_t input_size() const { return wide() ? sizeof(float) : sizeof(bf16); }
  // Bytes of `ks` k of `columns` columns; ks is a multiple of 8.
  int64_t bytes(int64_t ks, int64_t columns) const { return ks * columns * bits() / 8; }
};

// One panel of one matrix.
struct PanelOf {
  const Stack& s;
  const uint8_t* data;
  int64_t column;  // of all matrices' scales, where one row of scales follows another
  int width;

  PanelOf(const Stack& stack, int64_t expert, int64_t part, int64_t panel) : s(stack) {
    int64_t matrix = expert * s.parts + part;
    data = s.data + s.bytes(s.padded_k(), matrix * s.padded_n() + panel * kPanel);
    column = matrix * s.padded_n() + panel * kPanel;
    width = s.width(panel);
  }
  const uint8_t* end() const { return data + s.bytes(s.padded_k(), width); }
  const float* channel_scales() const {
    return reinterpret_cast<const float*>(s.scales) + column;
  }
  const bf16* group_scales() const {
    return reinterpret_cast<const bf16*>(s.scales) + column * s.groups();
  }
  const bf16* group_zeros() const { return s.zeros + column * s.groups(); }
  const uint8_t* block_scales() const { return s.scales + column * (s.padded_k() / kMXBlock); }
};

}  // namespace modulm
