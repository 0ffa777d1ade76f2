// sums[rows][64] = x[rows][K] times one panel of one expert's weight, scales applied.
#pragma once

#include "base/pool.h"
#include "linear/tile.h"
#include "moe/decode.h"
#include "moe/row.h"
#include "moe/scale.h"

namespace modulm {

// Scratch slots: the caller's and, in the same thread, those of its tasks.
enum MoeSlot { kPlan, kGathered, kInner, kMoeSums, kMoeGroup, kExpanded, kMoeTotals };

constexpr int64_t kExpandedK = 128;  // k decoded at a time: 16 KB of a panel

// Pairs of a panel that `multiply` fetches ahead where it streams.
#if defined(__AMX_BF16__)
constexpr int64_t kPairsAhead = 32;
#else
constexpr int64_t kPairsAhead = 16;
#endif

template <class F>
inline void row_blocks(int64_t rows, F&& f) {
  for (int64_t r = 0; r < rows; r += kBlockRows)
    f(r, int(rows - r < kBlockRows ? rows - r : kBlockRows));
}

inline void clear_sums(float* sums, int64_t rows) {
  std::memset(sums, 0, rows * kPanel * sizeof(float));
}

// A panel that comes from memory in one run; in its last pairs, what is read next is fetched.
inline void streamed_sums(const PanelOf& p, const bf16* x, int64_t ldx, int rows, float* sums,
                          const uint8_t* following) {
  auto b = reinterpret_cast<const uint32_t*>(p.data);
  int64_t pairs = p.s.padded_k() / 2, start = following ? pairs - kPairsAhead : pairs;
  if (start > 0) multiply(rows, x, ldx, b, p.width, p.width, start, sums, true);
  for (int64_t k = start > 0 ? start : 0; k < pairs; k += 16) {
    for (int64_t line = 0; line < p.width; line++) __builtin_prefetch(following + 64 * line, 0, 2);
    following += 64 * p.width;
    multiply(rows, x + 2 * k, ldx, b + k * p.width, p.width, p.width, 16, sums);
  }
}

inline void plain_sums(const PanelOf& p, const bf16* x, int64_t ldx, int64_t rows, float* sums,
                       const uint8_t* following) {
  auto b = reinterpret_cast<const uint32_t*>(p.data);
  row_blocks(rows, [&](int64_t r, int n) {
    if (r == 0) return streamed_sums(p, x, ldx, n, sums, following);
    multiply(n, x + r * ldx, ldx, b, p.width, p.width, p.s.padded_k() / 2, sums + r * kPanel);
  });
}

inline void decoded_sums(const PanelOf& p, const bf16* x, int64_t ldx, int64_t rows, float* sums,
                         const uint8_t* following) {
  Stream stream{p.end(), following};
  bool grouped = p.s.format == kStackInt4;
  float* part = sums;
  if (grouped)
    part = static_cast<float*>(scratch(kMoeGroup, rows * kPanel * int64_t(sizeof(float))));
  auto pairs = static_cast<uint32_t*>(scratch(kExpanded, kExpandedK * kPanel * 2));
  int64_t size = p.s.padded_k(), group = grouped ? p.s.group : size;
  for (int64_t first = 0; first < size; first += group) {
    if (grouped) clear_sums(part, rows);
    int64_t end = first + group < size ? first + group : size;
    for (int64_t k = first; k < end; k += kExpandedK) {
      int64_t ks = end - k < kExpandedK ? end - k : kExpandedK;
      expand(p, k, ks, pairs, stream);
      row_blocks(rows, [&](int64_t r, int n) {
        multiply(n, x + r * ldx + k, ldx, pairs, p.width, p.width, ks / 2, part + r * kPanel);
      });
    }
    for (int64_t r = 0; grouped && r < rows; r++)
      add_scaled(p, first / group, sum_of(x + r * ldx + first, group), part + r * kPanel,
                 sums + r * kPanel);
  }
  if (p.s.format == kStackInt8) scale_channels(p, rows, sums);
}

template <class T>
inline void float_sums(const PanelOf& p, const float* x, int64_t ldx, int64_t rows, float* sums) {
  auto b = reinterpret_cast<const T*>(p.data);
  for (int64_t k = 0; k < p.s.padded_k(); k += kExpandedK) {
    int64_t left = p.s.padded_k() - k, ks = left < kExpandedK ? left : kExpandedK;
    for (int64_t r = 0; r < rows; r += kFloatRows) {
      int n = int(rows - r < kFloatRows ? rows - r : kFloatRows);
      multiply_floats(n, x + r * ldx + k, ldx, b + k * p.width, p.width, ks, sums + r * kPanel,
                      r == 0);
    }
  }
}

// x: rows of padded K in bf16, or in fp32 for weights in fp32 and fp16. `following` is what this
// thread will most likely read next, or null: at a panel's end the memory would otherwise have
// nothing to do until the next one is asked for.
inline void panel_sums(const PanelOf& p, const void* x, int64_t ldx, int64_t rows, float* sums,
                       const uint8_t* following) {
  clear_sums(sums, rows);
  auto narrow = static_cast<const bf16*>(x);
  auto wide = static_cast<const float*>(x);
#if defined(__AVX512F__)
  if (rows == 1 && p.width == kPanel && !p.s.wide())
    return row_sums<1>({{&p}, {following}, narrow}, sums);
#endif
  switch (p.s.format) {
    case kStackFP32: return float_sums<float>(p, wide, ldx, rows, sums);
    case kStackFP16: return float_sums<fp16>(p, wide, ldx, rows, sums);
    case kStackBF16: return plain_sums(p, narrow, ldx, rows, sums, following);
    default: return decoded_sums(p, narrow, ldx, rows, sums, following);
  }
}

// The same of two panels: sums[2][rows][64]. One row reads them side by side.
inline void two_panel_sums(const PanelOf& first, const PanelOf& second, const void* x, int64_t ldx,
                           int64_t rows, float* sums, const uint8_t* after_first,
                           [[maybe_unused]] const uint8_t* after_second) {
#if defined(__AVX512F__)
  if (rows == 1 && first.width == kPanel && second.width == kPanel && !first.s.wide()) {
    clear_sums(sums, 2);
    auto row = static_cast<const bf16*>(x);
    return row_sums<2>({{&first, &second}, {after_first, after_second}, row}, sums);
  }
#endif
  panel_sums(first, x, ldx, rows, sums, second.data);
  panel_sums(second, x, ldx, rows, sums + rows * kPanel, after_first);
}

}  // namespace modulm
