// The kernels of fp8, compiled once for linear layers and experts.
#include "linear/codes.h"

#include <type_traits>

#include "linear/decode.h"
#include "linear/fp8.h"
#include "linear/tile.h"

namespace modulm {
namespace {

// sums += scale * the group's sums
inline void add_group(const Weight& w, int64_t panel, int64_t group, int64_t rows,
                      const float* part, float* sums) {
  int64_t first = w.scale_index(panel, group);
  for (int c = 0; c < w.width(panel); c += kLanes) {
    vf scale = load_scales(w.scales, first + c, w.scale_dtype);
    for (int64_t i = c; i < rows * kPanel; i += kPanel)
      store(sums + i, fused(load(part + i), scale, load(sums + i)));
  }
}

// Rows of padded K as T.
template <class T>
inline Rows<T> rows_as(const Weight& w, Rows<bf16> x, int64_t rows) {
  if constexpr (std::is_same_v<T, bf16>) return x;
  int64_t padded = w.padded_k();
  auto wide = static_cast<T*>(scratch(kDecoded, rows * padded * int64_t(sizeof(T))));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < padded; k += kLanes)
      store(wide + r * padded + k, load(x.data + r * x.stride + k));
  return {wide, padded};
}

// The most bytes of a panel that stay in a second-level cache with those that follow.
constexpr int64_t kFollowingBytes = 256 << 10;

// Few rows: codes are decoded in registers, without a buffer.
inline void fp8_few_sums(const Weight& w, int64_t panel, Rows<bf16> narrow, int64_t rows,
                         float* sums) {
  int width = w.width(panel);
  float* part = w.grouped() ? sums_of(rows, kGroupSums) : sums;
  Rows<FP8Input> x = rows_as<FP8Input>(w, narrow, rows);
  const int64_t tiles = div_up(rows, int64_t(kFP8Rows)), bytes = w.bytes(w.group, width);
  // Each tile asks for what follows, as some prefetches are dropped.
  const bool follows = streams_by_itself && tiles > 1 && bytes <= kFollowingBytes;
  const int64_t far = follows ? bytes : stream_distance(kFarAhead);
  for (int64_t group = 0; group < w.groups(); group++) {
    int64_t k = group * w.group;
    if (w.grouped()) zero(part, rows);
    for_row_blocks(rows, int(div_up(rows, tiles)), [&](int64_t r, int n) {
      multiply_fp8(n, x.data + r * x.stride + k, x.stride, w.panel(panel) + w.bytes(k, width), width,
                   w.group, far, follows, part + r * kPanel);
    });
    if (w.grouped()) add_group(w, panel, group, rows, part, sums);
  }
}

// k that are decoded at a time for all rows: products of pairs use them from the second-level cache,
// so that sums stay in registers for longer.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr int64_t kDecodedChunk = 1024;
#else
constexpr int64_t kDecodedChunk = kChunk;
#endif

#if defined(MODULM_SCALED_TILES)
// The group's scales of the panel's columns.
inline void load_group(const Weight& w, int64_t panel, int64_t group, float (&scales)[kPanel]) {
  const int64_t first = w.scale_index(panel, group);
  for (int c = 0; c < w.width(panel); c += kLanes)
    store(scales + c, load_scales(w.scales, first + c, w.scale_dtype));
}
#endif

}  // namespace

void fp8_sums(const Weight& w, int64_t panel, Rows<bf16> x, int64_t rows, float* sums) {
  int width = w.width(panel);
  if (fp8_in_registers(rows, width, w.grouped())) return fp8_few_sums(w, panel, x, rows, sums);
  auto decoded = static_cast<uint32_t*>(scratch(kDecoded, kDecodedChunk * kPanel * 2));
  const uint8_t* codes = w.panel(panel);
#if defined(MODULM_SCALED_TILES)
  if (w.grouped() && w.group <= kDecodedChunk) {
    alignas(64) float scales[kPanel];
    for (int64_t group = 0; group < w.groups(); group++) {
      const int64_t k = group * w.group;
      decode(w.format, codes + w.bytes(k, width), decoded, w.group, width);
      load_group(w, panel, group, scales);
      for_row_blocks(rows, kBlockRows, [&](int64_t r, int n) {
        add_product(n, x.data + r * x.stride + k, x.stride, decoded, width, w.group / 2, scales,
                    sums + r * kPanel);
      });
    }
    return;
  }
#endif
  float* part = w.grouped() ? sums_of(rows, kGroupSums) : sums;
  for (int64_t group = 0; group < w.groups(); group++) {
    int64_t k = group * w.group, end = k + w.group;
    if (w.grouped()) zero(part, rows);
    for (; k < end; k += kDecodedChunk) {
      int64_t ks = end - k < kDecodedChunk ? end - k : kDecodedChunk;
      decode(w.format, codes + w.bytes(k, width), decoded, ks, width);
      for_row_blocks(rows, kBlockRows, [&](int64_t r, int n) {
        multiply(n, x.data + r * x.stride + k, x.stride, decoded, width, width, ks / 2,
                 part + r * kPanel);
      });
    }
    if (w.grouped()) add_group(w, panel, group, rows, part, sums);
  }
}

}  // namespace modulm
