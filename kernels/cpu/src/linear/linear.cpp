// out[M, N] = x[M, K] * W^T (+ bias), W packed as weight.h says.
//
// A task is one panel of 64 columns times one block of rows, or with few rows a run of panels.
// Weights that need decoding are decoded chunk by chunk into a buffer in the first-level cache,
// once for all rows of the block.
#include "base/pool.h"
#include "base/replay.h"
#include "linear/codes.h"
#include "linear/few.h"
#include "linear/many.h"
#include "linear/product.h"
#include "linear/tile.h"

namespace modulm {
namespace {

// The most k of a bf16 panel that meet all rows of a block before the next k: with products of pairs,
// sums stay in registers and the panel in half of a second-level cache.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr int64_t kBF16Chunk = 3072;
// Up to so many rows take long enough to read their weights beside the products: while a shorter
// chunk meets all of them, the next one is fetched.
constexpr int64_t kFetchingRows = 128, kFetchingChunk = 1024;
constexpr int64_t kOnceRows = kMostTileRows;  // which use all of K at once
#else
constexpr int64_t kBF16Chunk = 256;
constexpr int64_t kFetchingRows = 0, kFetchingChunk = kBF16Chunk;
constexpr int64_t kOnceRows = kBlockRows;
#endif
#if defined(__AMX_BF16__)
constexpr int64_t kRowBlockBytes = 1 << 20;    // of x: half of a second-level cache
#elif defined(MODULM_WIDE_PAIRS)
constexpr int64_t kRowBlockBytes = 256 << 10;
#else
constexpr int64_t kRowBlockBytes = 512 << 10;
#endif
constexpr int64_t kRowBlockUnit = 96;          // a multiple of every kernel's rows
constexpr int64_t kRunBytes = 128 << 10;       // of weights that one thread reads in a row
constexpr int kManyRows = 64;
constexpr int kFewRows = 32;                   // up to here memory is the bottleneck of a product

// Few rows use all of K at once, directly from memory. With more rows, a chunk of the panel stays
// in a cache for all of them; their sums are stored in memory meanwhile, exactly.
void bf16_panel(const Product& p, int64_t panel, int64_t row, int64_t rows) {
  auto x = static_cast<const bf16*>(p.x);
  auto b = reinterpret_cast<const uint32_t*>(p.w.panel(panel));
  const bool once = rows <= kOnceRows, fetching = !once && rows <= kFetchingRows;
  const int width = p.w.width(panel);
  const int64_t last = p.w.padded_k(), tiles = div_up(rows, int64_t(kBlockRows));
  const int64_t most = once ? last : fetching ? kFetchingChunk : kBF16Chunk;
  const int size = once ? int(rows) : fetching ? int(div_up(rows, tiles)) : kBlockRows;
  const int64_t chunk = div_up(div_up(last, div_up(last, most)), kPadK) * kPadK;
  float* sums = sums_of(rows, kSums);
  for (int64_t k = 0; k < last; k += chunk) {
    int64_t ks = last - k < chunk ? last - k : chunk;
    const uint32_t* from = b + k / 2 * width;
    Ahead next(from + ks / 2 * width, p.w.bytes(ks, width), tiles * ks / 2);
    for_row_blocks(rows, size, [&](int64_t r, int n) {
      multiply(n, x + (row + r) * p.ldx + k, p.ldx, from, width, width, ks / 2,
               sums + r * kPanel, r == 0, fetching ? &next : nullptr);
    });
  }
  deliver(p, row, rows, panel, sums);
}

#if defined(__AVX512F__)
// One row times the panels from `panel` to `end`, two at a time as long as there are two of full
// width. Returns the first remaining panel.
int64_t bf16_row(const Product& p, int64_t panel, int64_t end) {
  auto x = static_cast<const bf16*>(p.x);
  auto at = [&](int64_t i) { return i < p.w.panels() ? p.w.panel(i) : nullptr; };
  for (; panel + 2 <= end && p.w.width(panel + 1) == kPanel; panel += 2) {
    float* sums = sums_of(2, kSums);
    one_row<2>(x, p.w.padded_k(), {at(panel), at(panel + 1)}, {at(panel + 2), at(panel + 3)}, sums);
    deliver(p, 0, 1, panel, sums);
    deliver(p, 0, 1, panel + 1, sums + kPanel);
  }
  for (; panel < end && p.w.width(panel) == kPanel; panel++) {
    float* sums = sums_of(1, kSums);
    one_row<1>(x, p.w.padded_k(), {at(panel)}, {at(panel + 1)}, sums);
    deliver(p, 0, 1, panel, sums);
  }
  return panel;
}
#endif

template <class T>
void float_panel(const Product& p, int64_t panel, int64_t row, int64_t rows) {
  auto x = static_cast<const float*>(p.x);
  auto b = reinterpret_cast<const T*>(p.w.panel(panel));
  int width = p.w.width(panel);
  float* sums = sums_of(rows, kSums);
  for (int64_t k = 0; k < p.w.k; k += kChunk) {
    int64_t ks = p.w.k - k < kChunk ? p.w.k - k : kChunk;
    for_row_blocks(rows, kFloatRows, [&](int64_t r, int n) {
      multiply_floats(n, x + (row + r) * p.ldx + k, p.ldx, b + k * width, width, ks,
                      sums + r * kPanel, r == 0);
    });
  }
  deliver(p, row, rows, panel, sums);
}

void panel_product(const Product& p, int64_t panel, int64_t row, int64_t rows) {
  switch (p.w.format) {
    case kWeightBF16: return bf16_panel(p, panel, row, rows);
    case kWeightFP32: return float_panel<float>(p, panel, row, rows);
    case kWeightFP16: return float_panel<fp16>(p, panel, row, rows);
  }
  float* sums = sums_of(rows * sums_of_row(p.w), kSums);
  const int64_t digits = digits_of(p.w);
  if (p.w.integer()) integer_sums(p.w, panel, p.integers, row * digits, rows * digits, sums);
  else fp8_sums(p.w, panel, {static_cast<const bf16*>(p.x) + row * p.ldx, p.ldx}, rows, sums);
  deliver(p, row, rows, panel, sums);
}

// Rows are divided evenly into as few blocks as the cache allows.
int64_t rows_per_block(const Product& p) {
  const Weight& w = p.w;
  bool wide = w.format == kWeightFP32 || w.format == kWeightFP16;
  int64_t bytes = w.padded_k() * (w.integer() ? digits_of(w) : wide ? 4 : 2);
  int64_t units = kRowBlockBytes / bytes / kRowBlockUnit;
  int64_t most = kRowBlockUnit * (units < 1 ? 1 : units > 6 ? 6 : units);
  return div_up(div_up(p.rows, div_up(p.rows, most)), kRowBlockUnit) * kRowBlockUnit;
}

// Panels per task: long enough for prefetching, while threads stay evenly loaded.
int64_t panels_per_task(const Product& p) {
  if (p.rows > kFewRows) return 1;
  int64_t run = kRunBytes / p.w.bytes(p.w.padded_k(), kPanel);
  if (p.rows == 1 && run < 2) run = 2;  // which are read together
  int64_t share = p.w.panels() / (4 * threads());
  int64_t count = run < share ? run : share;
  return count < 1 ? 1 : count;
}

void run(const Product& p) {
  int64_t block = rows_per_block(p);
  int64_t run = panels_per_task(p), runs = div_up(p.w.panels(), run);
  int64_t blocks = div_up(p.rows, block);
  auto work = [&](int64_t task) {
    int64_t first = task % runs * run, row = task / runs * block;
    int64_t rows = p.rows - row < block ? p.rows - row : block;
    int64_t panel = first, end = first + run < p.w.panels() ? first + run : p.w.panels();
#if defined(__AVX512F__)
    if (p.rows == 1 && p.w.format == kWeightBF16) panel = bf16_row(p, panel, end);
#endif
    for (; panel < end; panel++) panel_product(p, panel, row, rows);
#if defined(__AMX_BF16__)
    tiles.release();
#endif
  };
  // Panels run fastest, so that a block of rows stays cached while weights stream past it; several
  // blocks use the weights together, so that these are read from memory once.
  if (blocks == 1) return parallel_near(runs, work);
  parallel(runs * blocks, [&](int64_t task, int) { work(task); });
}

// x as To with K padded by zeros, unless it has this form already.
template <class T, class To>
void copy_input(const T* x, int64_t ldx, int64_t rows, int64_t k, To* to, int64_t padded) {
  parallel_runs(rows, 16384 / padded, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      for_lanes(k, [&](int64_t i, int n) {
        store_n(to + r * padded + i, load_n(x + r * ldx + i, n), n);
      });
      std::memset(to + r * padded + k, 0, (padded - k) * sizeof(To));
    }
  });
}

// Rows that are a multiple of 1 KB apart share few cache lines and evict each other: the rows of
// the copy are one line further apart.
template <class To>
void prepare_input(Product& p, int dtype, int wanted, int64_t padded) {
  constexpr int64_t line = 64 / sizeof(To);
  bool crowded = p.rows >= kManyRows && p.ldx * int64_t(sizeof(To)) % 1024 == 0;
  if (dtype == wanted && padded == p.w.k && !crowded) return;
  if (p.rows >= kManyRows) padded += line;
  auto copy = static_cast<To*>(scratch(kInput, p.rows * padded * int64_t(sizeof(To))));
  with_float(dtype, [&](auto t) {
    copy_input(static_cast<const decltype(t)*>(p.x), p.ldx, p.rows, p.w.k, copy, padded);
  });
  p.x = copy;
  p.ldx = padded;
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// form: weight_of's. bias: fp32 [n] or null. ldx, ldo: row strides in elements.
MODULM_API void modulm_linear(const void* x, int64_t ldx, int64_t rows, int dtype, const void* data,
                              const void* scales, const void* zeros, int64_t n, int64_t k,
                              int64_t group, int form, const float* bias, void* out, int64_t ldo,
                              int out_dtype) {
  if (rows == 0) return;
  Weight w = weight_of(data, scales, zeros, n, k, group, form);
  Activations integers{};
  if (w.integer()) integers = quantize(x, ldx, rows, dtype, w);
  Product p{w, x, ldx, integers, bias, out, ldo, out_dtype, rows};
#if defined(__AMX_BF16__)
  if (w.format == kWeightBF16 && rows >= kTiledRows) {
    return run_many(p, dtype);
  }
#endif
  if (w.format == kWeightFP32 || w.format == kWeightFP16) prepare_input<float>(p, dtype, kF32, k);
  else if (!w.integer()) prepare_input<bf16>(p, dtype, kBF16, w.padded_k());
  run(p);
}

MODULM_REPLAYABLE(linear)
