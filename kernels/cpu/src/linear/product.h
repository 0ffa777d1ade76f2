// One call of `linear`: the operands, and how sums become outputs.
#pragma once

#include "base/vec.h"
#include "linear/activations.h"
#include "linear/quad.h"
#include "linear/weight.h"

namespace modulm {

// Scratch slots: the caller's and, in the same thread, those of its tasks (5 to 7: activations.h).
enum Scratch { kInput, kSums, kGroupSums, kDecoded };

struct Product {
  const Weight& w;
  const void* x;  // bf16; fp32 for weights in fp32 and fp16; unused for integers
  int64_t ldx;
  const Activations& integers;
  const float* bias;
  void* out;
  int64_t ldo;
  int out_dtype;
  int64_t rows;

};

// sums: [rows * sums_of_row][64].
template <class T>
inline void deliver(const Product& p, int64_t row, int64_t rows, int64_t panel, const float* sums) {
  int64_t column = panel * kPanel, left = p.w.n - column;
  int64_t columns = left < kPanel ? left : kPanel;
  const int64_t each = sums_of_row(p.w);
  bool scaled = p.w.scales && !p.w.grouped();
  auto scales = static_cast<const float*>(p.w.scales) + column;
  for (int64_t r = 0; r < rows; r++) {
    T* to = static_cast<T*>(p.out) + (row + r) * p.ldo + column;
    const float* from = sums + r * each * kPanel;
    for_lanes(columns, [&](int64_t c, int n) {
      vf y = load(from + c);
      if (each == 2) y += load(from + kPanel + c);
      vf base = p.bias ? load_n(p.bias + column + c, n) : vf{};
      store_n(to + c, scaled ? fused(y, load(scales + c), base) : y + base, n);
    });
  }
}

inline void deliver(const Product& p, int64_t row, int64_t rows, int64_t panel,
                    const float* sums) {
  with_float(p.out_dtype, [&](auto t) { deliver<decltype(t)>(p, row, rows, panel, sums); });
}

}  // namespace modulm
