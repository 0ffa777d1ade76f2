// out[M, N] = x[M, K] * W^T (+ bias), W packed as weight.h says.
//
// A task is one panel of 64 columns times one block of rows. Quantized panels are decoded chunk by
// chunk into a buffer that stays in the first-level cache, once for all rows of the block; then
// one kernel multiplies whatever the format was.
#include "base/pool.h"
#include "base/replay.h"
#include "linear/decode.h"
#include "linear/tile.h"

namespace modulm {
namespace {

constexpr int64_t kChunk = 128;                // k decoded at a time
constexpr int64_t kRowBlockBytes = 512 << 10;  // of x: half of a second-level cache
constexpr int64_t kRowBlockUnit = 96;          // a multiple of every kBlockRows

// Scratch slots: the caller's and, in the same thread, those of its tasks.
enum Slot { kInput, kInputSums, kSums, kGroupSums, kDecoded };

struct Product {
  const Weight& w;
  const bf16* x;
  int64_t ldx;
  const float* group_sums;  // [M][groups], of x, for zero points
  const float* bias;
  void* out;
  int64_t ldo;
  int out_dtype;
  int64_t rows;
};

template <class T>
void deliver(const Product& p, int64_t row, int rows, int64_t column, const float* sums,
             const float* scales) {
  int64_t left = p.w.n - column;
  int64_t columns = left < kPanel ? left : kPanel;
  for (int r = 0; r < rows; r++) {
    T* to = static_cast<T*>(p.out) + (row + r) * p.ldo + column;
    for_lanes(columns, [&](int64_t c, int n) {
      vf y = load(sums + r * kPanel + c);
      if (scales) y *= load(scales + c);
      if (p.bias) y += load_n(p.bias + column + c, n);
      store_n(to + c, y, n);
    });
  }
}

void deliver(const Product& p, int64_t row, int rows, int64_t column, const float* sums,
             const float* scales) {
  with_float(p.out_dtype,
             [&](auto t) { deliver<decltype(t)>(p, row, rows, column, sums, scales); });
}

void zero(float* sums, int64_t rows) { std::memset(sums, 0, rows * kPanel * sizeof(float)); }

// sums += scale * (group's sums - zero * sum of x over the group)
void add_group(const Product& p, int64_t panel, int64_t group, int64_t row, int rows,
               const float* part, float* sums) {
  int width = p.w.width(panel);
  int64_t first = panel * kPanel * p.w.groups() + group * width;
  const bf16* scales = static_cast<const bf16*>(p.w.scales) + first;
  const bf16* zeros = p.w.zeros ? p.w.zeros + first : nullptr;
  for (int c = 0; c < width; c += kLanes) {
    vf scale = load(scales + c), zero = zeros ? load(zeros + c) : vf{};
    const float* totals = p.group_sums + row * p.w.groups() + group;
    for (int r = 0; r < rows; r++) {
      vf dot = load(part + r * kPanel + c);
      if (zeros) dot -= zero * totals[r * p.w.groups()];
      store(sums + r * kPanel + c, load(sums + r * kPanel + c) + dot * scale);
    }
  }
}

template <class F>
void for_row_blocks(int64_t rows, F&& f) {
  for (int64_t r = 0; r < rows; r += kBlockRows)
    f(r, int(rows - r < kBlockRows ? rows - r : kBlockRows));
}

void plain_panel(const Product& p, int64_t panel, int64_t row, int64_t rows) {
  alignas(64) float sums[kBlockRows * kPanel];
  auto b = reinterpret_cast<const uint32_t*>(p.w.panel(panel));
  int width = p.w.width(panel);
  for_row_blocks(rows, [&](int64_t r, int n) {
    zero(sums, n);
    multiply(n, p.x + (row + r) * p.ldx, p.ldx, b, width, width, p.w.padded_k() / 2, sums, r == 0);
    deliver(p, row + r, n, panel * kPanel, sums, nullptr);
  });
}

void quantized_panel(const Product& p, int64_t panel, int64_t row, int64_t rows) {
  const Weight& w = p.w;
  int width = w.width(panel);
  int64_t bytes = rows * kPanel * int64_t(sizeof(float));
  bool grouped = w.grouped();
  auto sums = static_cast<float*>(scratch(kSums, bytes));
  auto part = grouped ? static_cast<float*>(scratch(kGroupSums, bytes)) : sums;
  auto decoded = static_cast<uint32_t*>(scratch(kDecoded, kChunk * kPanel * 2));
  const uint8_t* codes = w.panel(panel);
  zero(sums, rows);
  for (int64_t group = 0; group < w.groups(); group++) {
    int64_t k = group * w.group, end = k + w.group;
    if (grouped) zero(part, rows);
    for (; k < end; k += kChunk) {
      int64_t ks = end - k < kChunk ? end - k : kChunk;
      decode(w.format, codes + w.bytes(k, width), decoded, ks, width);
      for_row_blocks(rows, [&](int64_t r, int n) {
        multiply(n, p.x + (row + r) * p.ldx + k, p.ldx, decoded, width, width, ks / 2,
                 part + r * kPanel);
      });
    }
    if (grouped) add_group(p, panel, group, row, int(rows), part, sums);
  }
  auto scales = grouped ? nullptr : static_cast<const float*>(w.scales) + panel * kPanel;
  for_row_blocks(rows, [&](int64_t r, int n) {
    deliver(p, row + r, n, panel * kPanel, sums + r * kPanel, scales);
  });
}

int64_t rows_per_block(int64_t padded_k) {
  int64_t units = kRowBlockBytes / (padded_k * 2) / kRowBlockUnit;
  return kRowBlockUnit * (units < 1 ? 1 : units > 4 ? 4 : units);
}

void run(const Product& p) {
  int64_t block = rows_per_block(p.w.padded_k());
  int64_t panels = p.w.panels();
  // Panels run fastest, so that a block of rows stays cached while weights stream past it.
  parallel(panels * div_up(p.rows, block), [&](int64_t task, int) {
    int64_t panel = task % panels, row = task / panels * block;
    int64_t rows = p.rows - row < block ? p.rows - row : block;
    if (p.w.format == kWeightBF16) plain_panel(p, panel, row, rows);
    else quantized_panel(p, panel, row, rows);
#if defined(__AMX_BF16__)
    tiles.release();
#endif
  });
}

// x in bf16 with K padded by zeros, where it is not so already.
template <class T>
void copy_input(const T* x, int64_t ldx, int64_t rows, int64_t k, bf16* to, int64_t padded) {
  parallel_runs(rows, 16384 / padded, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      for_lanes(k, [&](int64_t i, int n) {
        store_n(to + r * padded + i, load_n(x + r * ldx + i, n), n);
      });
      std::memset(to + r * padded + k, 0, (padded - k) * sizeof(bf16));
    }
  });
}

void sum_groups(const bf16* x, int64_t ldx, int64_t rows, const Weight& w, float* to) {
  int64_t groups = w.groups();
  parallel_runs(rows, 16384 / w.padded_k(), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      for (int64_t g = 0; g < groups; g++) {
        vf total{};
        for (int64_t k = g * w.group; k < (g + 1) * w.group; k += kLanes)
          total += load(x + r * ldx + k);
        to[r * groups + g] = sum(total);
      }
  });
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// bias: fp32 [n] or null. ldx, ldo: row strides in elements.
MODULM_API void modulm_linear(const void* x, int64_t ldx, int64_t rows, int dtype, const void* data,
                              const void* scales, const bf16* zeros, int64_t n, int64_t k,
                              int64_t group, int format, const float* bias, void* out, int64_t ldo,
                              int out_dtype) {
  if (rows == 0) return;
  Weight w{static_cast<const uint8_t*>(data), scales, zeros, n, k, group, format};
  int64_t padded = w.padded_k();
  auto input = static_cast<const bf16*>(x);
  if (dtype != kBF16 || padded != k) {
    auto copy = static_cast<bf16*>(scratch(kInput, rows * padded * int64_t(sizeof(bf16))));
    with_float(dtype, [&](auto t) {
      copy_input(static_cast<const decltype(t)*>(x), ldx, rows, k, copy, padded);
    });
    input = copy;
    ldx = padded;
  }
  float* sums = nullptr;
  if (zeros) {
    sums = static_cast<float*>(scratch(kInputSums, rows * w.groups() * int64_t(sizeof(float))));
    sum_groups(input, ldx, rows, w, sums);
  }
  run({w, input, ldx, sums, bias, out, ldo, out_dtype, rows});
}

MODULM_REPLAYABLE(linear)
