// Rows of a table, copied as bytes.
#include <cstring>

#include "base/pool.h"
#include "base/types.h"

MODULM_API void modulm_embedding(const int64_t* ids, const void* table, int64_t row_bytes, void* out,
                                 int64_t count) {
  auto from = static_cast<const char*>(table);
  auto to = static_cast<char*>(out);
  modulm::parallel_runs(count, 32768 / row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      std::memcpy(to + i * row_bytes, from + ids[i] * row_bytes, row_bytes);
  });
}
