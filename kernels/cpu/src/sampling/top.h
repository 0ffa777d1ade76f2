// Finding the few greatest of many values, reading most of them only once.
#pragma once

#include <algorithm>
#include <functional>

#include "base/pool.h"
#include "base/vec.h"

namespace modulm {

constexpr int64_t kTopBlock = 64;

inline float block_maximum(const float* x, int64_t count) {
  vf best = splat(-__builtin_inff());
  for_lanes(count, [&](int64_t i, int n) {
    vf some = load_n(x + i, n);
    for (int l = n; l < kLanes; l++) some[l] = -__builtin_inff();
    best = vmax(best, some);
  });
  return largest(best);
}

// A value that at least k of x reach: the k-th greatest of the maxima of its blocks, or -infinity
// where there are fewer blocks. `slot` is scratch memory (see base/pool.h).
inline float reached_by(const float* x, int64_t size, int64_t k, int slot) {
  int64_t blocks = div_up(size, kTopBlock);
  if (k > blocks) return -__builtin_inff();
  auto maxima = static_cast<float*>(scratch(slot, blocks * int64_t(sizeof(float))));
  for (int64_t b = 0; b < blocks; b++)
    maxima[b] = block_maximum(x + b * kTopBlock, std::min(kTopBlock, size - b * kTopBlock));
  std::nth_element(maxima, maxima + k - 1, maxima + blocks, std::greater<float>());
  return maxima[k - 1];
}

// f(i) for every x[i] >= bound, in order.
template <class F>
inline void for_each_from(const float* x, int64_t size, float bound, F&& f) {
  for (int64_t begin = 0; begin < size; begin += kTopBlock) {
    int64_t count = std::min(kTopBlock, size - begin);
    if (block_maximum(x + begin, count) < bound) continue;
    for (int64_t i = begin; i < begin + count; i++)
      if (x[i] >= bound) f(i);
  }
}

}  // namespace modulm
