// The best values of each row, the chosen value and its rank, optionally as log probabilities.
#include <cmath>

#include "base/math.h"
#include "base/pool.h"
#include "sampling/top.h"

namespace modulm {
namespace {

enum Slot { kMaxima = 5, kBest = 6 };

// log(sum(exp(x))), in blocks whose sums are added in fp64.
float log_sum(const float* x, int64_t size) {
  constexpr int64_t kBlock = 4096;
  float peak = -__builtin_inff();
  for (int64_t b = 0; b < size; b += kTopBlock)
    peak = std::max(peak, block_maximum(x + b, std::min(kTopBlock, size - b)));
  double total = 0;
  for (int64_t b = 0; b < size; b += kBlock) {
    vf block{};
    for_lanes(std::min(kBlock, size - b), [&](int64_t i, int n) {
      vf some = load_n(x + b + i, n);
      for (int l = n; l < kLanes; l++) some[l] = -__builtin_inff();
      block += vexp(some - peak);
    });
    total += double(sum(block));
  }
  return float(peak + std::log(total));
}

int64_t count_above(const float* x, int64_t size, float value) {
  vi found{};
  for_lanes(size, [&](int64_t i, int n) {
    vf some = load_n(x + i, n);
    for (int l = n; l < kLanes; l++) some[l] = -__builtin_inff();
    found -= some > value;  // a true lane is -1
  });
  int64_t total = 0;
  for (int l = 0; l < kLanes; l++) total += found[l];
  return total;
}

// The k best, greatest first, the lowest id first among equals.
void best_of(const float* x, int64_t size, int64_t k, int64_t* ids) {
  auto found = static_cast<int64_t*>(scratch(kBest, size * int64_t(sizeof(int64_t))));
  int64_t count = 0;
  for_each_from(x, size, reached_by(x, size, k, kMaxima), [&](int64_t i) { found[count++] = i; });
  std::partial_sort(found, found + k, found + count, [&](int64_t a, int64_t b) {
    return x[a] > x[b] || (x[a] == x[b] && a < b);
  });
  std::copy(found, found + k, ids);
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// The op `top_logprobs`: values [rows, size] with row stride `stride`; ids, best: [rows, 1 + k].
MODULM_API void modulm_top_logprobs(const float* values, int64_t stride, int64_t rows, int64_t size,
                                    const int64_t* chosen, int64_t k, int normalise, int64_t* ids,
                                    float* best, int64_t* rank) {
  parallel(rows, [&](int64_t r, int) {
    const float* x = values + r * stride;
    int64_t* to = ids + r * (1 + k);
    to[0] = chosen[r];
    if (k) best_of(x, size, k, to + 1);
    float less = normalise ? log_sum(x, size) : 0.0f;
    for (int64_t i = 0; i <= k; i++) best[r * (1 + k) + i] = x[to[i]] - less;
    rank[r] = 1 + count_above(x, size, x[chosen[r]]);
  });
}
