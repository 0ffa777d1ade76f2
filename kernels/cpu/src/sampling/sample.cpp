// Choosing tokens from logits: argmax, and drawing with temperature, min-p, top-k and top-p.
//
// No sort. min-p gives a threshold at once; top-k and top-p find theirs by radix selection on the
// bits of the values, 11 at a time from the top: a histogram of counts and weights gives the bin of
// the threshold, and only the members of that bin are examined again. The draw is a running sum in
// the order of ids. Rows are independent of each other.
#include <cmath>
#include <initializer_list>

#include "base/math.h"
#include "base/pool.h"
#include "sampling/top.h"

namespace modulm {
namespace {

constexpr int kBins = 2048;
constexpr float kNever = -__builtin_inff();
constexpr float kSlack = 1e-3f;  // more than the rounding of a logarithm

struct Best {
  float value;
  int64_t id;  // -1 unless the value is finite
};

// A row is scanned in pieces; only the piece with the greatest value is scanned again.
constexpr int64_t kPiece = 8192;

// The greatest value of a piece; NaN if there is one.
template <class T>
float peak_of(const T* piece, int64_t size) {
  vf best = splat(kNever);
  vi nan{};
  for_lanes(size, [&](int64_t i, int n) {
    vf x = load_n(piece + i, n);
    nan |= x != x;
    for (int l = n; l < kLanes; l++) x[l] = kNever;
    best = vmax(best, x);
  });
  for (int l = 0; l < kLanes; l++)
    if (nan[l]) return __builtin_nanf("");
  return largest(best);
}

inline int64_t piece_size(int64_t size, int64_t piece) {
  int64_t left = size - piece * kPiece;
  return left < kPiece ? left : kPiece;
}

// The greatest value and its lowest id, from the peaks of all pieces. NaN counts as greatest.
template <class T>
Best best_of(const T* row, int64_t size, const float* peaks) {
  int64_t pieces = div_up(size, kPiece), where = 0;
  for (int64_t i = 0; i < pieces; i++) {
    if (peaks[i] != peaks[i]) return {peaks[i], -1};
    if (peaks[i] > peaks[where]) where = i;
  }
  float value = peaks[where];
  if (!std::isfinite(value)) return {value, -1};
  int64_t id = where * kPiece;
  while (load_one(row + id) != value) id++;
  return {value, id};
}

template <class T>
Best find_best(const T* row, int64_t size) {
  int64_t pieces = div_up(size, kPiece);
  auto peaks = static_cast<float*>(scratch(0, pieces * int64_t(sizeof(float))));
  for (int64_t i = 0; i < pieces; i++) peaks[i] = peak_of(row + i * kPiece, piece_size(size, i));
  return best_of(row, size, peaks);
}

// Order-preserving bits of a float: greater value, greater number.
inline uint32_t ordered(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
inline float unordered(uint32_t u) {  // its inverse
  u = u & 0x80000000u ? u & 0x7fffffffu : ~u;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

// The remaining values, and what each contributes to the goal: 1 or its probability.
struct Members {
  uint32_t* keys;
  float* shares;
  int64_t count;
};

// The bin of the digit at `shift` in which the shares, added up from the top bin, reach `wanted`.
// `reached` is advanced to what lies above that bin. Sums in another order may miss the goal by
// their last bit: then the lowest bin with members is meant.
uint32_t find_bin(const Members& m, int shift, uint32_t mask, double wanted, double& reached) {
  double totals[kBins] = {};
  for (int64_t i = 0; i < m.count; i++) totals[m.keys[i] >> shift & mask] += m.shares[i];
  uint32_t lowest = 0;
  double above = reached;
  for (uint32_t bin = mask + 1; bin-- > 0;) {
    if (totals[bin] == 0) continue;
    lowest = bin;
    reached = above;
    above += totals[bin];
    if (above >= wanted) break;
  }
  return lowest;
}

// The greatest value at which the shares of it, its equals and everything greater reach `wanted`.
float select(Members m, double wanted) {
  double reached = 0;
  uint32_t prefix = 0;
  for (int shift : {21, 10, 0}) {
    uint32_t mask = shift ? 2047 : 1023;
    uint32_t bin = find_bin(m, shift, mask, wanted, reached);
    prefix |= bin << shift;
    int64_t kept = 0;
    for (int64_t i = 0; i < m.count; i++)
      if ((m.keys[i] >> shift & mask) == bin) {
        m.keys[kept] = m.keys[i];
        m.shares[kept++] = m.shares[i];
      }
    m.count = kept;
  }
  return unordered(prefix);
}

// One row with a temperature above 0. The running sum is taken in blocks of kBlock, whose sums in
// order are milestones: only the block of the draw is scanned token by token.
int64_t draw(const float* logits, int64_t size, Best best, float temperature, int top_k,
             float top_p, float min_p, double uniform) {
  constexpr int64_t kBlock = 4096;
  int64_t blocks = div_up(size, kBlock);
  auto scaled = static_cast<float*>(scratch(1, size * int64_t(sizeof(float))));
  auto sums = static_cast<double*>(scratch(2, blocks * int64_t(sizeof(double))));
  for_lanes(size, [&](int64_t i, int n) {
    store_n(scaled + i, load_n(logits + i, n) / temperature, n);
  });
  float peak = scaled[best.id];
  float floor = min_p > 0 ? peak + std::log(min_p) : kNever;
  auto gather = [&](float bound, bool weighted) {
    Members m{static_cast<uint32_t*>(scratch(3, size * int64_t(sizeof(uint32_t)))),
              static_cast<float*>(scratch(4, size * int64_t(sizeof(float)))), 0};
    for_each_from(scaled, size, bound, [&](int64_t i) {
      m.keys[m.count] = ordered(scaled[i]);
      m.shares[m.count++] = scaled[i];
    });
    for_lanes(m.count, [&](int64_t i, int n) {
      vf share = weighted ? vexp(load_n(m.shares + i, n) - peak) : splat(1.0f);
      store_n(m.shares + i, share, n);
    });
    return m;
  };
  auto weigh = [&] {
    double total = 0;
    for (int64_t b = 0; b < blocks; b++) {
      int64_t count = size - b * kBlock < kBlock ? size - b * kBlock : kBlock;
      vf block{};
      for_lanes(count, [&](int64_t i, int n) {
        vf x = load_n(scaled + b * kBlock + i, n);
        for (int l = n; l < kLanes; l++) x[l] = kNever;
        block += choose(x >= floor, vexp(x - peak), vf{});
      });
      sums[b] = total += double(sum(block));
    }
    return total;
  };
  if (top_k > 0 && top_k < size) {
    float bound = std::max(floor, reached_by(scaled, size, top_k, 5));
    floor = std::max(floor, select(gather(bound, false), top_k));
  }
  double total = weigh();
  if (top_p < 1) {
    // Tokens with negligible shares, even all together, are skipped.
    double least = (1 - double(top_p)) * total / double(size);
    float bound = least > 0 ? peak + float(std::log(least)) - kSlack : kNever;
    float lowest = select(gather(std::max(floor, bound), true), double(top_p) * total);
    if (lowest > floor) floor = lowest, total = weigh();
  }
  double target = uniform * total;
  int64_t b = 0, last = best.id;
  while (b + 1 < blocks && sums[b] <= target) b++;
  double running = b ? sums[b - 1] : 0.0;
  for (int64_t i = b * kBlock; i < size && i < (b + 1) * kBlock; i++) {
    if (scaled[i] < floor) continue;
    running += vexp(splat(scaled[i] - peak))[0];
    last = i;
    if (running > target) return i;
  }
  return last;
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// logits: [rows, size] with row stride `stride`; out: [rows].
MODULM_API void modulm_argmax(const void* logits, int64_t stride, int64_t rows, int64_t size,
                              int dtype, int64_t* out) {
  with_float(dtype, [&](auto t) {
    auto from = static_cast<const decltype(t)*>(logits);
    int64_t pieces = div_up(size, kPiece);
    auto peaks = static_cast<float*>(scratch(0, rows * pieces * int64_t(sizeof(float))));
    parallel(rows * pieces, [&](int64_t i, int) {
      int64_t r = i / pieces, piece = i % pieces;
      peaks[i] = peak_of(from + r * stride + piece * kPiece, piece_size(size, piece));
    });
    for (int64_t r = 0; r < rows; r++)
      out[r] = best_of(from + r * stride, size, peaks + r * pieces).id;
  });
}

// The op `sample`; all vectors are [rows].
MODULM_API void modulm_sample(const float* logits, int64_t stride, int64_t rows, int64_t size,
                              const float* temperature, const int32_t* top_k, const float* top_p,
                              const float* min_p, const double* uniform, int64_t* out) {
  parallel(rows, [&](int64_t r, int) {
    const float* row = logits + r * stride;
    Best best = find_best(row, size);
    bool greedy = best.id < 0 || temperature[r] <= 0;
    out[r] = greedy ? best.id
                    : draw(row, size, best, temperature[r], top_k[r], top_p[r], min_p[r],
                           uniform[r]);
  });
}

// The op `apply_penalties`; places, ids and what follows are [n].
MODULM_API void modulm_penalties(float* logits, int64_t stride, int64_t n, const int64_t* places,
                                 const int64_t* ids, const float* counts, const float* repetition,
                                 const float* frequency, const float* presence) {
  parallel_runs(n, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      float* at = logits + places[i] * stride + ids[i];
      float x = *at > 0 ? *at / repetition[i] : *at * repetition[i];
      *at = x - frequency[i] * counts[i] - (counts[i] > 0 ? presence[i] : 0.0f);
    }
  });
}

// The op `apply_bitmask`; words: 32-bit words of a mask row.
MODULM_API void modulm_bitmask(float* logits, int64_t stride, int64_t size, int64_t n,
                               const int64_t* places, const uint32_t* mask, int64_t words) {
  parallel(n, [&](int64_t r, int) {
    float* row = logits + places[r] * stride;
    const uint32_t* bits = mask + r * words;
    for (int64_t w = 0; w * 32 < size; w++) {
      if (bits[w] == 0xffffffffu) continue;
      for (int64_t i = w * 32; i < size && i < (w + 1) * 32; i++)
        if (!(bits[w] >> (i % 32) & 1)) row[i] = kNever;
    }
  });
}
