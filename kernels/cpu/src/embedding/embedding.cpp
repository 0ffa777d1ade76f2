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

// One column of a packed matrix: lanes of one or two k, which lie `width` lanes apart.
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

MODULM_REPLAYABLE(embedding)
MODULM_REPLAYABLE(embedding_packed)
