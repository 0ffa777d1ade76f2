// Sums of one panel of codes, for linear layers and experts.
#pragma once

#include <cstring>

#include "base/pool.h"
#include "linear/integer.h"
#include "linear/product.h"

namespace modulm {

constexpr int64_t kChunk = 128;  // k decoded or multiplied at a time

inline void zero(float* sums, int64_t rows) {
  std::memset(sums, 0, rows * kPanel * sizeof(float));
}

inline float* sums_of(int64_t rows, int slot) {
  auto sums = static_cast<float*>(scratch(slot, rows * kPanel * int64_t(sizeof(float))));
  zero(sums, rows);
  return sums;
}

// f(row, rows) over [0, total) in blocks of `size`.
template <class F>
inline void for_row_blocks(int64_t total, int size, F&& f) {
  for (int64_t r = 0; r < total; r += size) f(r, int(total - r < size ? total - r : size));
}

template <class T>
struct Rows {
  const T* data;
  int64_t stride;
};

// sums[rows][64] += x * the panel, with the scales of groups, if any, applied.
void fp8_sums(const Weight& w, int64_t panel, Rows<bf16> x, int64_t rows, float* sums);

// The same for integers. Rows are those of `a`: digits are counted. With more than kQuadRows the
// first is a multiple of kRowTile; fewer lie in one tile.
void integer_sums(const Weight& w, int64_t panel, const Activations& a, int64_t row, int64_t rows,
                  float* sums);

}  // namespace modulm
