// Writing the cache: alone, or fused with the split, norm and rotation of a qkv projection.
#include "attention/cache.h"
#include "base/pool.h"
#include "base/replay.h"
#include "norm/norm.h"
#include "rope/rope.h"

namespace modulm {
namespace {

constexpr int64_t kElementsPerTask = 8192;

// Tokens per task: two groups of adjacent tokens if every thread still gets several tasks.
int64_t grain(int64_t tokens, int64_t elements) {
  if (tokens >= 8 * kNeighbours * threads()) return 2 * kNeighbours;
  return kElementsPerTask / elements;
}

// Whether several adjacent tokens can be written to a cache of these elements at once.
template <class E>
inline constexpr bool kManyAtOnce = std::is_same_v<E, bf16>;

// Whether tokens [i, i + kNeighbours) are adjacent in a block and can be written together.
bool neighbours(const Cache& c, const int64_t* slots, int64_t i, int64_t end) {
  if (c.latent || i + kNeighbours > end) return false;
  if (slots[i] < 0 || slots[i] % kNeighbours) return false;
  for (int64_t n = 1; n < kNeighbours; n++)
    if (slots[i + n] != slots[i] + n) return false;
  return true;
}

// Writes one head of kNeighbours tokens. key(n, to), value(n, to): write token n's, [size].
template <class T, class Key, class Value>
void put_neighbours(const Cache& c, int64_t slot, int64_t head, int64_t size, int64_t value_size,
                    const Key& key, const Value& value) {
  alignas(64) bf16 rows[kNeighbours * kMaxSize];
  T row[kMaxSize];
  const int64_t id = slot / c.block, at = slot % c.block;
  for (int64_t n = 0; n < kNeighbours; n++) encode(key(n, row), size, c.size, rows + n * c.size);
  scatter_keys(c, reinterpret_cast<bf16*>(c.keys(id, head)), at, rows);
  for (int64_t n = 0; n < kNeighbours; n++)
    encode(value(n), value_size, c.value_size, rows + n * c.value_size);
  for (int64_t n = 0; n < kNeighbours; n += 2)
    scatter_pair(c, reinterpret_cast<bf16*>(c.values(id, head)), at + n, rows + n * c.value_size,
                 rows + (n + 1) * c.value_size);
}

// Not inlined: it is the same for all callers and formats of a cache.
template <class E, class T>
[[gnu::noinline]] void put(const Cache& c, int64_t slot, int64_t head, const T* k, int64_t size,
                           const T* v, int64_t value_size) {
  put_token<E>(c, slot, head, k, size, v, value_size);
}

// The norm and the rotation of a query or a key.
struct Preparation {
  int64_t size;
  int norm_dtype;
  float eps, offset;
  const void* table;
  int64_t turned;
  int table_dtype;
  const int64_t* positions;
  bool neox;

  // Not inlined: it is the same for queries, keys and all formats of a cache.
  template <class T>
  [[gnu::noinline]] void operator()(const T* from, const void* norm, int64_t token, T* to) const {
    if (!norm) std::memcpy(to, from, size * sizeof(T));
    else if (norm_dtype == kF32)
      rms_row(from, static_cast<const float*>(norm), eps, offset, to, size);
    else rms_row(from, static_cast<const T*>(norm), eps, offset, to, size);
    if (!table) return;
    const int64_t row = positions[token] * turned;
    if (table_dtype == kF32) rotate_head(to, static_cast<const float*>(table) + row, turned, neox);
    else rotate_head(to, static_cast<const T*>(table) + row, turned, neox);
  }
};

}  // namespace
}  // namespace modulm

using namespace modulm;

// k: [tokens, heads, size], v: [tokens, heads, value_size] with the given strides in elements;
// negative slots are skipped.
MODULM_API void modulm_write_kv(const void* k, int64_t k_token, int64_t k_head, const void* v,
                                int64_t v_token, int64_t v_head, int64_t tokens, int64_t size,
                                int64_t value_size, int dtype, void* data, int64_t heads,
                                int64_t block, int64_t padded, int64_t padded_value, int latent,
                                int cache_dtype, const int64_t* slots) {
  Cache cache{static_cast<uint8_t*>(data), heads, block, padded, padded_value, cache_dtype,
              latent != 0};
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    with_cache(cache_dtype, [&](auto e) {
      using E = decltype(e);
      parallel_runs(tokens, grain(tokens, heads * size), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          if (slots[i] < 0) continue;
          if constexpr (kManyAtOnce<E>)
            if (neighbours(cache, slots, i, end)) {
              for (int64_t h = 0; h < heads; h++)
                put_neighbours<T>(
                    cache, slots[i], h, size, value_size,
                    [&](int64_t n, T*) {
                      return static_cast<const T*>(k) + (i + n) * k_token + h * k_head;
                    },
                    [&](int64_t n) {
                      return static_cast<const T*>(v) + (i + n) * v_token + h * v_head;
                    });
              i += kNeighbours - 1;
              continue;
            }
          for (int64_t h = 0; h < heads; h++)
            put<E>(cache, slots[i], h, static_cast<const T*>(k) + i * k_token + h * k_head, size,
                   static_cast<const T*>(v) + i * v_token + h * v_head, value_size);
        }
      });
    });
  });
}

// qkv: [tokens, (q_heads + 2 heads) * size] with row stride `stride`; norms: [size], fp32 or of
// qkv's dtype, or null;
// table: [positions][turned] or null; q_out: [tokens, q_heads, size], contiguous.
MODULM_API void modulm_qkv_prepare(const void* qkv, int64_t stride, int64_t tokens, int64_t q_heads,
                                   int64_t size, int dtype, const void* q_norm,
                                   const void* k_norm, int norm_dtype, float eps, float offset,
                                   const void* table, int64_t turned, int table_dtype,
                                   const int64_t* positions, int neox, void* data, int64_t heads,
                                   int64_t block, int64_t padded, int64_t padded_value, int latent,
                                   int cache_dtype, const int64_t* slots, void* q_out) {
  Cache cache{static_cast<uint8_t*>(data), heads, block, padded, padded_value, cache_dtype,
              latent != 0};
  const Preparation prepare{size,  norm_dtype,  eps,       offset,   table,
                            turned, table_dtype, positions, neox != 0};
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    int64_t per_token = (q_heads + 2 * heads) * size;
    with_cache(cache_dtype, [&](auto e) {
      using E = decltype(e);
      parallel_runs(tokens, grain(tokens, per_token), [&](int64_t begin, int64_t end) {
        auto row = [&](int64_t i) { return static_cast<const T*>(qkv) + i * stride; };
        auto key = [&](int64_t i, int64_t h, T* to) -> const T* {
          prepare(row(i) + (q_heads + h) * size, k_norm, i, to);
          return to;
        };
        auto value = [&](int64_t i, int64_t h) { return row(i) + (q_heads + heads + h) * size; };
        for (int64_t i = begin; i < end; i++)
          for (int64_t h = 0; h < q_heads; h++)
            prepare(row(i) + h * size, q_norm, i,
                    static_cast<T*>(q_out) + (i * q_heads + h) * size);
        for (int64_t i = begin; i < end; i++) {
          if (slots[i] < 0) continue;
          if constexpr (kManyAtOnce<E>)
            if (neighbours(cache, slots, i, end)) {
              for (int64_t h = 0; h < heads; h++)
                put_neighbours<T>(
                    cache, slots[i], h, size, size,
                    [&](int64_t n, T* to) { return key(i + n, h, to); },
                    [&](int64_t n) { return value(i + n, h); });
              i += kNeighbours - 1;
              continue;
            }
          for (int64_t h = 0; h < heads; h++) {
            T one[kMaxSize];
            put<E>(cache, slots[i], h, key(i, h, one), size, value(i, h), size);
          }
        }
      });
    });
  });
}

MODULM_REPLAYABLE(write_kv)
MODULM_REPLAYABLE(qkv_prepare)
