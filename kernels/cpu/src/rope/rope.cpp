// Rotary position embedding in place.
#include "rope/rope.h"

#include "base/pool.h"
#include "base/replay.h"

namespace modulm {
namespace {

struct Heads {
  void* data;
  int64_t token_stride, head_stride, heads;
};

template <class T, class C>
void rotate(const Heads (&groups)[2], const int64_t* positions, const C* table, int64_t tokens,
            int64_t size, bool neox) {
  int64_t per_token = (groups[0].heads + groups[1].heads) * size;
  parallel_runs(tokens, 8192 / (per_token + 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
      for (const Heads& g : groups)
        for (int64_t h = 0; h < g.heads; h++)
          rotate_head(static_cast<T*>(g.data) + t * g.token_stride + h * g.head_stride,
                      table + positions[t] * size, size, neox);
  });
}

}  // namespace
}  // namespace modulm

using namespace modulm;

MODULM_API void modulm_rotary(void* q, int64_t q_token, int64_t q_head, int64_t q_heads, void* k,
                              int64_t k_token, int64_t k_head, int64_t k_heads,
                              const int64_t* positions, const void* table, int64_t tokens,
                              int64_t size, int neox, int dtype, int table_dtype) {
  const Heads groups[2] = {{q, q_token, q_head, q_heads}, {k, k_token, k_head, k_heads}};
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    if (table_dtype == kF32)
      rotate<T>(groups, positions, static_cast<const float*>(table), tokens, size, neox);
    else
      rotate<T>(groups, positions, static_cast<const T*>(table), tokens, size, neox);
  });
}

MODULM_REPLAYABLE(rotary)
