// Activations as integers: a row of x is, per step of 256 k, scale * code.
//
// With one digit codes are int8. With two they are 16-bit numbers 256 * high + low, held as two
// rows of int8 whose products are added as integers (of blocks in fp32): as exact as bf16 for every
// value within 2^-7 of the largest of its step, at twice the products, and with no conversion of the
// weights.
#pragma once

#include "base/pairs.h"
#include "base/pool.h"
#include "linear/weight.h"

namespace modulm {

// Number of rows that are stored together, as a tile of the kernel.
#if defined(__AMX_INT8__)
constexpr int kRowTile = 16;
#elif defined(MODULM_QUAD_DOT)
constexpr int kRowTile = 6;
#elif defined(MODULM_MANY_REGISTERS)
constexpr int kRowTile = 4;
#else
constexpr int kRowTile = 2;
#endif

constexpr int kBlockK = 64;

constexpr int kWideRows = 6;  // rows of 16 bits that a kernel takes at once

#if defined(MODULM_WIDE_PAIRS)
constexpr bool kWideDigits = true;
#else
constexpr bool kWideDigits = false;
#endif

// Whether kernels of many rows look up where sums begin (cached.h).
#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)
constexpr bool kFindsStarts = true;
#else
constexpr bool kFindsStarts = false;
#endif

// How many rows of bytes hold a row of activations: as many as it has digits, or two, if these are
// numbers of 16 bits (wide.h). Then sums take one row, else one for each digit.
inline int64_t digits_of(const Weight& w) { return kWideDigits ? 2 : w.digits; }
inline int64_t sums_of_row(const Weight& w) { return w.blocks() && !kWideDigits ? w.digits : 1; }

// Row d of r * digits + d is digit d of row r, the most significant first, except in wide.h.
struct Activations {
  int8_t* codes;   // [rows / kRowTile][padded K / 64][kRowTile][64]
  float* scales;   // [rows][steps]
  int32_t* sums;   // [rows][runs], of codes, times what makes the centre of weights' codes 0: where
                   // sums of products begin; of formats with minima see blocks.h
  int64_t rows;    // with digits counted
  int64_t blocks;  // padded K / 64
  int64_t steps, runs;
  // Where sums of products begin for each of the sixteen whole zeros of int4, [rows][runs][16], or
  // null: a column's is then found by a permutation, which no product waits for.
  int32_t* starts_of_zeros = nullptr;

  const int8_t* at(int64_t row, int64_t k) const {
    return codes + ((row / kRowTile * blocks + k / kBlockK) * kRowTile + row % kRowTile) * kBlockK +
           k % kBlockK;
  }
  static constexpr int64_t kBlockStride = kRowTile * kBlockK;  // to the next 64 k
};

// Size in bytes of this many rows for a product with `w`, and a view of such memory. Digits are not
// counted.
int64_t activation_bytes(int64_t rows, const Weight& w);
Activations activations_in(void* memory, int64_t rows, const Weight& w);

// Quantizes a row of w.k numbers to row `row` of `to`.
void quantize_row(const Activations& to, const Weight& w, const void* x, int dtype, int64_t row);

// Copies row `source` of `from` to row `row` of `to`; both are for a product with `w`.
void copy_row(const Activations& to, const Weight& w, const Activations& from, int64_t source,
              int64_t row);

// Quantizes all rows of x. The result is in scratch slot 5, until this thread quantizes again.
Activations quantize(const void* x, int64_t ldx, int64_t rows, int dtype, const Weight& w);

}  // namespace modulm
