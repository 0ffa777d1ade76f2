// The state of some rows after some splits.
#pragma once

#include "attention/exp2.h"

namespace modulm {

constexpr float kNever = -__builtin_inff();

// Number of rows of a buffer for `rows`: AMX tiles are multiples of 16, except for the first.
inline int64_t padded_rows(int64_t rows) { return rows <= 16 ? rows : div_up(rows, 16) * 16; }

// Per row: the maximum score times log2(e), the sum of exp(score - maximum), and the values
// weighted by those. The row stride is not a power of two.
struct State {
  float* peak;
  float* total;
  float* values;
  int64_t stride;

  State(float* memory, int64_t rows, int64_t value_size)
      : peak(memory),
        total(memory + rows),
        values(memory + 2 * rows),
        stride(row_floats(value_size)) {}

  static int64_t row_floats(int64_t value_size) { return div_up(value_size, 16) * 16 + 16; }
  static int64_t floats(int64_t rows, int64_t value_size) {
    return div_up(rows * (2 + row_floats(value_size)), 16) * 16;
  }
  // The rows from one on.
  State from(int64_t row) const {
    State rest = *this;
    rest.peak += row, rest.total += row, rest.values += row * stride;
    return rest;
  }
  float* row(int64_t r) const { return values + r * stride; }
  void fetch(int64_t rows) const {
    __builtin_prefetch(peak);
    __builtin_prefetch(total);
    for (int64_t i = 0; i < rows * stride; i += 16) __builtin_prefetch(values + i);
  }
  void clear_values(int64_t first, int64_t rows) const {
    std::memset(row(first), 0, rows * stride * sizeof(float));
  }
};

inline void merge(const State& into, const State& from, int rows) {
  for (int r = 0; r < rows; r++) {
    float peak = into.peak[r] > from.peak[r] ? into.peak[r] : from.peak[r];
    float mine = decay(into.peak[r], peak), theirs = decay(from.peak[r], peak);
    into.peak[r] = peak;
    into.total[r] = into.total[r] * mine + from.total[r] * theirs;
    float* to = into.row(r);
    const float* add = from.row(r);
    for (int64_t c = 0; c < into.stride - 16; c += kLanes)
      store(to + c, load(to + c) * mine + load(add + c) * theirs);
  }
}

}  // namespace modulm
