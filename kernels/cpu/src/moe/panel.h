// sums[rows][64] = rows of x times one panel of one expert's weight, scales applied.
#pragma once

#include "base/pool.h"
#include "linear/codes.h"
#include "linear/few.h"
#include "linear/tile.h"
#include "moe/stack.h"

namespace modulm {

// Scratch slots: the caller's and, in the same thread, those of its tasks; beside the linear layers'.
enum MoeSlot { kPlan = 6, kGathered, kRoundedInputs, kInner, kRoundedInner, kMoeSums, kMoeTotals };

// Pairs of a panel that `multiply` prefetches when it streams.
#if defined(__AMX_BF16__)
constexpr int64_t kPairsAhead = 32;
#else
constexpr int64_t kPairsAhead = 16;
#endif

// The beginning of the codes, which is prefetched while another panel is multiplied.
constexpr int64_t kBeginning = 4 * kQuadsFar;

// Rows of padded K: floats side by side, or integers from `place` on (digits are not counted).
struct Inputs {
  const void* x;
  int64_t ldx;
  const Activations* integers;
  int64_t place;
};

// Rows of sums that `rows` rows need.
inline int64_t room(const Weight& w, int64_t rows) {
  return w.integer() ? rows * digits_of(w) + kRowTile : rows;
}

// A panel that is read from memory sequentially; during its last pairs, the next data is
// prefetched.
inline void streamed_sums(const PanelOf& p, const bf16* x, int64_t ldx, int rows, float* sums,
                          const uint8_t* following) {
  auto b = reinterpret_cast<const uint32_t*>(p.data());
  int width = p.width();
  int64_t pairs = p.w.padded_k() / 2, start = following ? pairs - kPairsAhead : pairs;
  if (start > 0) multiply(rows, x, ldx, b, width, width, start, sums, true);
  for (int64_t k = start > 0 ? start : 0; k < pairs; k += 16) {
    for (int64_t line = 0; line < width; line++) __builtin_prefetch(following + 64 * line, 0, 2);
    following += 64 * width;
    multiply(rows, x + 2 * k, ldx, b + k * width, width, width, 16, sums);
  }
}

inline void plain_sums(const PanelOf& p, const bf16* x, int64_t ldx, int64_t rows, float* sums,
                       const uint8_t* following) {
  auto b = reinterpret_cast<const uint32_t*>(p.data());
  for_row_blocks(rows, kBlockRows, [&](int64_t r, int n) {
    if (r == 0) return streamed_sums(p, x, ldx, n, sums, following);
    multiply(n, x + r * ldx, ldx, b, p.width(), p.width(), p.w.padded_k() / 2, sums + r * kPanel);
  });
}

template <class T>
inline void float_sums(const PanelOf& p, const float* x, int64_t ldx, int64_t rows, float* sums) {
  auto b = reinterpret_cast<const T*>(p.data());
  for (int64_t k = 0; k < p.w.padded_k(); k += kChunk) {
    int64_t left = p.w.padded_k() - k, ks = left < kChunk ? left : kChunk;
    for_row_blocks(rows, kFloatRows, [&](int64_t r, int n) {
      multiply_floats(n, x + r * ldx + k, ldx, b + k * p.width(), p.width(), ks, sums + r * kPanel,
                      r == 0);
    });
  }
}

// to[rows][64] = from[rows * sums_of_row][64], digits added, the scales of columns applied. `from` may
// be `to` or come after it.
inline void fold_sums(const PanelOf& p, int64_t rows, const float* from, float* to) {
  const int64_t each = sums_of_row(p.w);
  const bool grouped = p.w.grouped();
  if (grouped && each == 1 && from == to) return;
  auto scales = static_cast<const float*>(p.w.scales) + p.panel * kPanel;
  for (int64_t r = 0; r < rows; r++, from += each * kPanel, to += kPanel)
    for (int c = 0; c < p.width(); c += kLanes) {
      vf y = load(from + c);
      if (each == 2) y += load(from + kPanel + c);
      store(to + c, grouped ? y : y * load(scales + c));
    }
}

inline void coded_sums(const PanelOf& p, const Inputs& in, int64_t rows, float* sums,
                       const uint8_t* following) {
  // What lies directly behind the panel is part of its stream.
  const uint8_t* end = p.data() + p.w.bytes(p.w.padded_k(), p.width());
  for (int64_t i = 0; following && following != end && i < kBeginning; i += 64)
    __builtin_prefetch(following + i, 0, 2);
  if (!p.w.integer()) {
    zero(sums, rows);
    fp8_sums(p.w, p.panel, {static_cast<const bf16*>(in.x), in.ldx}, rows, sums);
    return fold_sums(p, rows, sums, sums);
  }
  // Tiles of rows are not split: rows of the first tile before these are multiplied as well.
  const int64_t digits = digits_of(p.w);
  int64_t first = in.place * digits, before = first % kRowTile;
  zero(sums, before + rows * digits);
  integer_sums(p.w, p.panel, *in.integers, first - before, before + rows * digits, sums);
  fold_sums(p, rows, sums + before * sums_of_row(p.w) / digits * kPanel, sums);
}

// `following` is what this thread will probably read next, or null: it is prefetched at the end of
// the panel, when memory would otherwise be idle. sums: `room` rows.
inline void panel_sums(const PanelOf& p, const Inputs& in, int64_t rows, float* sums,
                       const uint8_t* following) {
  if (p.w.bits() > 8) zero(sums, rows);
  auto narrow = static_cast<const bf16*>(in.x);
  auto wide = static_cast<const float*>(in.x);
#if defined(__AVX512F__)
  if (rows == 1 && p.width() == kPanel && p.w.format == kWeightBF16)
    return one_row<1>(narrow, p.w.padded_k(), {p.data()}, {following}, sums);
#endif
  switch (p.w.format) {
    case kWeightFP32: return float_sums<float>(p, wide, in.ldx, rows, sums);
    case kWeightFP16: return float_sums<fp16>(p, wide, in.ldx, rows, sums);
    case kWeightBF16: return plain_sums(p, narrow, in.ldx, rows, sums, following);
    default: return coded_sums(p, in, rows, sums, following);
  }
}

// The same for two panels, whose sums are `room` rows apart. One row of bf16 reads them together.
inline void two_panel_sums(const PanelOf& first, const PanelOf& second, const Inputs& in,
                           int64_t rows, float* sums, const uint8_t* after_first,
                           [[maybe_unused]] const uint8_t* after_second) {
#if defined(__AVX512F__)
  if (rows == 1 && first.width() == kPanel && second.width() == kPanel &&
      first.w.format == kWeightBF16) {
    zero(sums, 2);
    return one_row<2>(static_cast<const bf16*>(in.x), first.w.padded_k(),
                      {first.data(), second.data()}, {after_first, after_second}, sums);
  }
#endif
  panel_sums(first, in, rows, sums, second.data());
  panel_sums(second, in, rows, sums + room(first.w, rows) * kPanel, after_first);
}

}  // namespace modulm
