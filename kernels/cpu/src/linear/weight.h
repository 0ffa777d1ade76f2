// A packed weight matrix [N, K] of a linear layer.
//
// Columns (outputs) are cut into panels of 64, the last one 16, 32, 48 or 64 wide ("width"); N is
// padded to 16 and K to 32, with zeros. Within a panel two successive k of one column lie in one
// 32-bit lane ("pair"), the form that vdpbf16ps and tdpbf16ps multiply:
//
//   bf16   [panel][K / 2][width][2]             2 bytes a weight
//   int8   [panel][K / 2][width][2]             1 byte
//   fp8    the same, e4m3fn                     1 byte
//   int4   [panel][K / 8][width][8 nibbles]     half a byte; nibble j of the 32-bit lane is
//          k = 2 j for j < 4 and k = 2 (j - 4) + 1 for j >= 4, so that a shift by 4 j leaves pair
//          (2 j, 2 j + 1) in the low nibbles of the lane's two halves
//
// A weight is scale * (code - zero), where the code of an int4 weight is its nibble - 8. With one
// group for all of K and no zeros, scales are fp32 [N]; otherwise scales and zeros are bf16
// [panel][K / group][width].
#pragma once

#include "base/types.h"

namespace modulm {

enum Format : int { kWeightBF16 = 0, kWeightInt8 = 1, kWeightFP8 = 2, kWeightInt4 = 3 };

constexpr int kPanel = 64;
constexpr int kPadK = 32;

struct Weight {
  const uint8_t* data;
  const void* scales;  // null for bf16
  const bf16* zeros;   // null when all are 0
  int64_t n, k;
  int64_t group;  // a multiple of 32, or the padded K
  int format;

  int64_t padded_k() const { return div_up(k, kPadK) * kPadK; }
  int64_t padded_n() const { return div_up(n, 16) * 16; }
  bool grouped() const { return groups() > 1 || zeros; }
  int64_t panels() const { return div_up(n, kPanel); }
  int64_t groups() const { return div_up(padded_k(), group); }
  int width(int64_t panel) const {
    int64_t left = padded_n() - panel * kPanel;
    return left < kPanel ? int(left) : kPanel;
  }
  int bits() const { return format == kWeightBF16 ? 16 : format == kWeightInt4 ? 4 : 8; }
  // Bytes of `ks` k of a panel of this width; ks is a multiple of 8.
  int64_t bytes(int64_t ks, int width) const { return ks * width * bits() / 8; }
  const uint8_t* panel(int64_t p) const { return data + bytes(padded_k(), kPanel) * p; }
};

}  // namespace modulm
