// Rows of a table: copied as bytes from a plain table, gathered in pairs from a packed one, or
// decoded from codes.
#include <atomic>
#include <cstring>

#include "base/pool.h"
#include "base/replay.h"
#include "linear/blocks.h"

namespace modulm {
namespace {

// Number `i` of scales or zero points, of the type `dtype`.
float one_scale(const void* p, int64_t i, int dtype) {
  float found = 0;
  if (dtype == kE8M0) {
    uint32_t bits = uint32_t(static_cast<const uint8_t*>(p)[i]) << 23;
    std::memcpy(&found, &bits, sizeof found);
    return found;
  }
  with_float(dtype, [&](auto t) { found = load_one(static_cast<const decltype(t)*>(p) + i); });
  return found;
}

// Calls row(id, target) for ids in [0, rows). Zeroes the rows of other ids and returns their
// number.
template <class F>
int64_t look_up(const int64_t* ids, int64_t count, int64_t rows, char* out, int64_t row_bytes,
                F&& row) {
  std::atomic<int64_t> outside{0};
  parallel_runs(count, 32768 / row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      char* target = out + i * row_bytes;
      if (ids[i] >= 0 && ids[i] < rows) row(ids[i], target);
      else std::memset(target, 0, row_bytes), outside++;
    }
  });
  return outside;
}

// One column of a packed matrix: lanes of one or two k, `width` lanes apart.
template <class Lane>
void gather_column(const Weight& w, int64_t column, int64_t size, char* target) {
  constexpr int64_t kAhead = 64;
  int64_t panel = column / kPanel, step = w.width(panel), row_bytes = w.k * size;
  auto from = reinterpret_cast<const Lane*>(w.data + panel * kPanel * w.padded_k() * size) +
              column % kPanel;
  int64_t lanes = row_bytes / int64_t(sizeof(Lane));
  for (int64_t i = 0; i < lanes; i++) {
    __builtin_prefetch(from + (i + kAhead) * step);
    std::memcpy(target + i * sizeof(Lane), from + i * step, sizeof(Lane));
  }
  int64_t done = lanes * int64_t(sizeof(Lane));
  std::memcpy(target + done, from + lanes * step, row_bytes - done);
}

// Decodes one column of packed codes, 64 at a time.
template <class T>
void decode_column(const Weight& w, int64_t column, T* target) {
  if (w.blocks()) {
    auto wide = static_cast<float*>(scratch(0, w.k * int64_t(sizeof(float))));
    block_column(w, column, wide);
    return for_lanes(w.k, [&](int64_t i, int n) { store_n(target + i, load_n(wide + i, n), n); });
  }
  constexpr int64_t kAhead = 32;
  const int64_t panel = column / kPanel, width = w.width(panel), each = 32 / w.bits();
  auto lanes = reinterpret_cast<const uint32_t*>(w.panel(panel)) + column % kPanel;
  alignas(64) float values[kPanel];
  float scale = 0, zero = 0;
  for (int64_t k = 0; k < w.k; k += kPanel) {
    int64_t count = w.k - k < kPanel ? w.k - k : kPanel;
    for (int64_t i = 0; i < count; i++) {
      int64_t at = k + i, within = at % each;
      if (at % w.group == 0) {
        int64_t index = w.scale_index(panel, at / w.group) + column % kPanel;
        scale = one_scale(w.scales, index, w.scale_dtype);
        zero = w.zeros ? one_scale(w.zeros, index, w.scale_dtype) : 0.0f;
      }
      if (within == 0) __builtin_prefetch(lanes + (at / each + kAhead) * width);
      uint32_t lane = lanes[at / each * width];
      int64_t shift = w.format == kWeightInt4 ? 4 * (within / 2 + 4 * (within % 2)) : 8 * within;
      uint32_t stored = lane >> shift & (w.format == kWeightInt4 ? 15u : 255u);
      if (w.format == kWeightInt4) stored = kTableCodes[w.table][stored];
      values[i] = scale * (float(int(stored) - w.centre()) - zero);
    }
    for_lanes(count, [&](int64_t i, int n) { store_n(target + k + i, load_n(values + i, n), n); });
  }
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// The op `embedding`: table [rows, row_bytes / size of an element]. Returns the number of ids
// outside the table; their rows of `out` are zeros.
MODULM_API int64_t modulm_embedding(const int64_t* ids, const void* table, int64_t rows,
                                    int64_t row_bytes, void* out, int64_t count) {
  auto from = static_cast<const char*>(table);
  return look_up(ids, count, rows, static_cast<char*>(out), row_bytes,
                 [&](int64_t id, char* to) { std::memcpy(to, from + id * row_bytes, row_bytes); });
}

// The same from a float matrix [n, k] that was packed for `linear`; `size` bytes an element.
MODULM_API int64_t modulm_embedding_packed(const int64_t* ids, const void* data, int64_t n,
                                           int64_t k, int64_t size, int64_t lane, void* out,
                                           int64_t count) {
  Weight w{static_cast<const uint8_t*>(data), nullptr, nullptr, n, k, 0, kWeightBF16};
  return look_up(ids, count, n, static_cast<char*>(out), k * size, [&](int64_t id, char* to) {
    if (lane == 4) gather_column<uint32_t>(w, id, size, to);
    else gather_column<uint16_t>(w, id, size, to);
  });
}

// The same from codes that were packed for `linear`; form: weight_of's. Rows come out
// in the float type `dtype`.
MODULM_API int64_t modulm_embedding_codes(const int64_t* ids, const void* data, const void* scales,
                                          const void* zeros, int64_t n, int64_t k, int64_t group,
                                          int form, int dtype, void* out, int64_t count) {
  Weight w = weight_of(data, scales, zeros, n, k, group, form);
  int64_t outside = 0;
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    outside = look_up(ids, count, n, static_cast<char*>(out), k * int64_t(sizeof(T)),
                      [&](int64_t id, char* to) {
                        decode_column(w, id, reinterpret_cast<T*>(to));
                      });
  });
  return outside;
}

MODULM_REPLAYABLE(embedding)
MODULM_REPLAYABLE(embedding_codes)
MODULM_REPLAYABLE(embedding_packed)
