// Rows of a table: copied as bytes from a plain one, gathered pair by pair from a packed one.
#include <atomic>
#include <cstring>

#include "base/pool.h"
#include "base/replay.h"
#include "linear/weight.h"

namespace modulm {
namespace {

// Calls row(id, target) for ids in [0, rows) and zeroes the rows of others, whose number it returns.
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

// One column of a packed bf16 matrix: k values, which lie in pairs `width` pairs apart.
void gather_column(const Weight& w, int64_t column, char* target) {
  constexpr int64_t kAhead = 64;
  int64_t panel = column / kPanel, step = w.width(panel), pairs = w.k / 2;
  auto from = reinterpret_cast<const uint32_t*>(w.panel(panel)) + column % kPanel;
  for (int64_t i = 0; i < pairs; i++) {
    __builtin_prefetch(from + (i + kAhead) * step);
    std::memcpy(target + i * 4, from + i * step, 4);
  }
  if (w.k % 2) std::memcpy(target + pairs * 4, from + pairs * step, 2);
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// The op `embedding`: table [rows, row_bytes / size of an element]. Returns how many ids lie
// outside of it; their rows of `out` are zeros.
MODULM_API int64_t modulm_embedding(const int64_t* ids, const void* table, int64_t rows,
                                    int64_t row_bytes, void* out, int64_t count) {
  auto from = static_cast<const char*>(table);
  return look_up(ids, count, rows, static_cast<char*>(out), row_bytes,
                 [&](int64_t id, char* to) { std::memcpy(to, from + id * row_bytes, row_bytes); });
}

// The same from a bf16 matrix [n, k] that was packed for `linear`.
MODULM_API int64_t modulm_embedding_packed(const int64_t* ids, const void* data, int64_t n,
                                           int64_t k, void* out, int64_t count) {
  Weight w{static_cast<const uint8_t*>(data), nullptr, nullptr, n, k, 0, kWeightBF16};
  return look_up(ids, count, n, static_cast<char*>(out), k * int64_t(sizeof(bf16)),
                 [&](int64_t id, char* to) { gather_column(w, id, to); });
}

MODULM_REPLAYABLE(embedding)
MODULM_REPLAYABLE(embedding_packed)
