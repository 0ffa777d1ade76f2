// The RMSNorm of one row, shared with the fused preparation of queries and keys.
#pragma once

#include <cmath>

#include "base/vec.h"

namespace modulm {

// out may be row; weight may be null. Four running sums, so that additions do not wait for each other.
template <class T, class W, class O>
inline void rms_row(const T* row, const W* weight, float eps, float offset, O* out, int64_t size) {
  vf squares[4] = {};
  for_lanes(size, [&](int64_t i, int n) {
    vf v = load_n(row + i, n);
    squares[(i / kLanes) & 3] += v * v;
  });
  vf total = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  float factor = 1.0f / std::sqrt(sum(total) / float(size) + eps);
  for_lanes(size, [&](int64_t i, int n) {
    vf y = load_n(row + i, n) * factor;
    store_n(out + i, weight ? y * (load_n(weight + i, n) + offset) : y, n);
  });
}

}  // namespace modulm
