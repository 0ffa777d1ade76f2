// A packed weight matrix [N, K] of a linear layer.
//
// Columns (outputs) are cut into panels of 64, the last one 16, 32, 48 or 64 wide ("width"); N is
// padded to 16 and K to 64, with zeros. Within a panel successive k of one column lie in one
// 32-bit lane, in the form that the multiplying instructions take: pairs for vdpbf16ps and
// tdpbf16ps, quads for vpdpbusd and tdpbsud.
//
//   bf16   [panel][K / 2][width][2]             2 bytes a weight
//   fp8    the same, e4m3fn                     1 byte
//   int8   [panel][K / 4][width][4]             1 byte, the code + 128, unsigned
//   int4   [panel][K / 8][width][8 nibbles]     half a byte; nibble j of the 32-bit lane is
//          k = 2 j for j < 4 and k = 2 (j - 4) + 1 for j >= 4. A shift by 4 j leaves pair
//          (2 j, 2 j + 1) in the low nibbles of the lane's two halves; the low nibbles of its
//          four bytes are the quad (0, 4, 1, 5), the high ones (2, 6, 3, 7)
//   fp32, fp16   [panel][K][width]              as they are
//   q4_k, q5_k, q6_k   [panel][K / 256] of what ggml's blocks of 256 k have, in as many bits, in
//   the order in which it is read:
//          [3 or 4][width] lanes   scales and minima of groups of 32, in six bits as ggml has them;
//                                  of q6_k scales of groups of 16, signed bytes
//          [1 or 2][width] fp16    what scales and, not of q6_k, minima are multiplied by
//          and of each 64 k
//          [8][width][8 nibbles]   of q4_k codes; byte b of a lane has k = b in its low nibble,
//                                  4 + b in the high one
//          2 x [1 + 4][width] lanes   of q5_k the bits above the fourth, byte b of a lane those of
//                                  k = b, 4 + b, 8 + b ... from the lowest on, and nibbles as above
//          4 x [3][width] lanes    of q6_k; byte b of lane i has k = 4 i + b in its low six bits, above
//                                  them the i-th pair of bits of k = 12 + b
//
// A weight is scale * (code - zero), where the code of an int4 weight is its nibble - 8, or what a
// table has for its nibble. With one group for all of K and no zeros, scales are fp32 [N]; otherwise
// scales and zeros are [panel][K / group][width], in `scale_dtype`.
#pragma once

#include "base/types.h"

namespace modulm {

enum Format : int {
  kWeightBF16 = 0,
  kWeightInt8 = 1,
  kWeightFP8 = 2,
  kWeightInt4 = 3,
  kWeightFP32 = 4,
  kWeightFP16 = 5,
  kWeightQ4K = 6,
  kWeightQ5K = 7,
  kWeightQ6K = 8,
};

// What nibbles stand for.
enum Table : int {
  kNoTable = 0,  // themselves, less 8
  kE2M1 = 1,     // twice the floats of four bits of OCP Microscaling Formats, version 1.0
  kIQ4 = 2,      // the sixteen numbers of ggml's IQ4 types
  kTables = 3,
};

// Unsigned codes: the numbers of the table, plus the centre.
constexpr int kCentres[kTables] = {8, 12, 127};
constexpr uint8_t kTableCodes[kTables][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0},
    {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240},
};

constexpr int kCentreQ6K = 32;

constexpr int kPanel = 64;
constexpr int kPadK = 64;
// k that share a scale of integer activations.
constexpr int64_t kStep = 256;
// The fewest k that share a scale of integer weights.
constexpr int64_t kLeastGroup = 16;

struct Weight {
  const uint8_t* data;
  const void* scales;  // null for bf16, fp32, fp16
  const void* zeros;   // null when all are 0
  int64_t n, k;
  int64_t group;  // a multiple of kLeastGroup (fp8: of 32), or the padded K
  int format;
  int digits = 0;  // int8 digits of an activation; 0: activations are bf16
  int scale_dtype = kBF16;
  bool whole_zeros = true;  // zeros of int4 are nibbles themselves, less 8
  int table = kNoTable;     // of int4
  int64_t all_groups = 1, all_runs = 1;  // counted once, as every panel needs them: divisions are slow

  int64_t padded_k() const { return div_up(k, kPadK) * kPadK; }
  int64_t padded_n() const { return div_up(n, 16) * 16; }
  bool grouped() const { return groups() > 1 || zeros; }
  int64_t panels() const { return div_up(n, kPanel); }
  int64_t groups() const { return all_groups; }
  int64_t steps() const { return div_up(k, kStep); }
  // k that are summed as integers: a group, or a step of a longer one.
  int64_t run() const { return group < kStep ? group : kStep; }
  int64_t runs() const { return all_runs; }
  int64_t run_end(int64_t r) const {
    int64_t end = (r + 1) * run();
    return end < padded_k() ? end : padded_k();
  }
  // Where the last run ends: the padded K, or short of it with groups below 64.
  int64_t runs_end() const { return run_end(runs() - 1); }
  int width(int64_t panel) const {
    int64_t left = padded_n() - panel * kPanel;
    return left < kPanel ? int(left) : kPanel;
  }
  // Blocks of kStep k have their scales beside them: K is whole steps, a group 32 or 16.
  bool blocks() const { return format >= kWeightQ4K; }
  bool minima() const { return format == kWeightQ4K || format == kWeightQ5K; }
  bool integer() const { return format == kWeightInt8 || format == kWeightInt4 || blocks(); }
  int bits() const {
    switch (format) {
      case kWeightFP32: return 32;
      case kWeightBF16:
      case kWeightFP16: return 16;
      case kWeightInt4: return 4;
      default: return 8;
    }
  }
  // What an unsigned stored code is above the code that it stands for; formats with minima have none.
  int centre() const {
    if (blocks()) return minima() ? 0 : kCentreQ6K;
    return format == kWeightInt8 ? 128 : kCentres[table];
  }
  // The sum of a run's activations is this times where sums of products begin (activations.h); exact
  // where there are zeros.
  float total_of_start() const { return -1.0f / float(centre()); }
  // Bytes of a column's block.
  int block_bytes() const { return format == kWeightQ4K ? 144 : format == kWeightQ5K ? 176 : 210; }
  // Bytes of `ks` k of so many columns; ks is a multiple of 8, of blocks one of kStep.
  int64_t bytes(int64_t ks, int64_t width) const {
    return blocks() ? ks / kStep * width * block_bytes() : ks * width * bits() / 8;
  }
  const uint8_t* panel(int64_t p) const { return data + bytes(padded_k(), kPanel) * p; }
  // Index into scales and zeros of a panel's group.
  int64_t scale_index(int64_t panel, int64_t group_index) const {
    return panel * kPanel * groups() + group_index * width(panel);
  }
};

// The C ABI passes the last five fields in one number (linear.py builds it).
inline Weight weight_of(const void* data, const void* scales, const void* zeros, int64_t n,
                        int64_t k, int64_t group, int form) {
  Weight w{static_cast<const uint8_t*>(data), scales, zeros, n, k, group, form & 0xff};
  w.digits = form >> 8 & 0xff;
  w.scale_dtype = form >> 16 & 0xff;
  w.whole_zeros = !(form >> 24 & 1);
  w.table = form >> 25;
  if (group > 0) {  // else nothing but panels is asked for
    w.all_groups = div_up(k, group);
    w.all_runs = div_up(k, w.run());
  }
  return w;
}

}  // namespace modulm
