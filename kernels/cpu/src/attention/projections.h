// The qkv projections of new tokens: what becomes of them before attention.
#pragma once

#include "attention/cache.h"
#include "base/replay.h"

namespace modulm {

// Tokens and kv heads.
struct Part {
  int64_t begin, end, first_head, end_head;
};

struct Projections {
  const void* qkv;  // [tokens, (q_heads + 2 kv heads) * size], rows `stride` elements apart
  int64_t stride, tokens, q_heads, size;
  int dtype;
  const void *q_norm, *k_norm;  // [size], or null
  int norm_dtype;               // fp32 or that of qkv
  float eps, offset;
  const void* table;  // [positions][turned], or null
  int64_t turned;
  int table_dtype;
  const int64_t* positions;
  bool neox;
  Cache cache;
  const int64_t* slots;  // [tokens]; negative ones are not written
  void* q_out;           // [tokens, q_heads, size], contiguous

  // Writes the part's queries and its part of the cache: splits, norms and turns them.
  void prepare(const Part& part) const;
  // Reads the blocks that the part is written to, in the order of memory.
  void fetch(const Part& part) const;
  // All of them, on all threads.
  void prepare() const;
};

// From the arguments of modulm_qkv_prepare.
inline Projections projections(const void* qkv, int64_t stride, int64_t tokens, int64_t q_heads,
                               int64_t size, int dtype, const void* q_norm, const void* k_norm,
                               int norm_dtype, float eps, float offset, const void* table,
                               int64_t turned, int table_dtype, const int64_t* positions, int neox,
                               void* data, int64_t heads, int64_t block, int64_t padded,
                               int64_t padded_value, int latent, int cache_dtype,
                               const int64_t* slots, void* q_out) {
  return {qkv, stride, tokens, q_heads, size, dtype, q_norm, k_norm, norm_dtype, eps, offset, table,
          turned, table_dtype, positions, neox != 0,
          Cache{static_cast<uint8_t*>(data), heads, block, padded, padded_value, cache_dtype,
                latent != 0},
          slots, q_out};
}

}  // namespace modulm

MODULM_API int64_t modulm_replay_qkv_prepare(const modulm::Slot* s);
