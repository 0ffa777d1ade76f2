// Writing the cache: alone, or fused with the split, norm and rotation of a qkv projection.
#include <algorithm>

#include "attention/prepare.h"
#include "attention/projections.h"
#include "base/pool.h"
#include "base/replay.h"

namespace modulm {
namespace {

constexpr int64_t kElementsPerTask = 8192;
constexpr int64_t kTokensAhead = 2;  // whose projections are fetched
constexpr int kKeysOfTask = 3;       // scratch slot

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
  const int64_t id = slot / c.block, at = slot % c.block;
  if constexpr (std::is_same_v<T, bf16>) {
    const bf16* keys[kNeighbours];  // evenly spaced
    for (int64_t n = 0; n < kNeighbours; n++) keys[n] = key(n, rows + n * size);
    const int64_t spacing = keys[1] - keys[0];
    if (size == c.size && value_size == c.value_size && spacing % 2 == 0) {
      scatter_keys(c, reinterpret_cast<bf16*>(c.keys(id, head)), at, keys[0], spacing);
      for (int64_t n = 0; n < kNeighbours; n += 2)
        scatter_pair(c, reinterpret_cast<bf16*>(c.values(id, head)), at + n, value(n),
                     value(n + 1));
      return;
    }
  }
  T row[kMaxSize];
  for (int64_t n = 0; n < kNeighbours; n++) encode(key(n, row), size, c.size, rows + n * c.size);
  scatter_keys(c, reinterpret_cast<bf16*>(c.keys(id, head)), at, rows, c.size);
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

// Writes tokens and heads of a part; those with negative slots are skipped. key(token, head, to): a
// head's key, which it may write to `to`; value(token, head).
template <class E, class T, class Key, class Value>
void write_tokens(const Cache& cache, const int64_t* slots, const Part& part, int64_t size,
                  int64_t value_size, const Key& key, const Value& value) {
  for (int64_t i = part.begin; i < part.end; i++) {
    if (slots[i] < 0) continue;
    if constexpr (kManyAtOnce<E>)
      if (neighbours(cache, slots, i, part.end)) {
        for (int64_t h = part.first_head; h < part.end_head; h++)
          put_neighbours<T>(
              cache, slots[i], h, size, value_size,
              [&](int64_t n, T* to) { return key(i + n, h, to); },
              [&](int64_t n) { return value(i + n, h); });
        i += kNeighbours - 1;
        continue;
      }
    for (int64_t h = part.first_head; h < part.end_head; h++) {
      T one[kMaxSize];
      put<E>(cache, slots[i], h, key(i, h, one), size, value(i, h), value_size);
    }
  }
}

template <class E, class T>
void prepare_part(const Projections& p, const Part& part) {
  const Preparation prepare{p.size,   p.norm_dtype,  p.eps,       p.offset, p.table,
                            p.turned, p.table_dtype, p.positions, p.neox};
  const int64_t size = p.size, heads = p.cache.heads, begin = part.begin, end = part.end;
  const bool all = part.end_head - part.first_head == heads;
  const int64_t first = all ? 0 : part.first_head * (p.q_heads / heads);
  const int64_t last = all ? p.q_heads : part.end_head * (p.q_heads / heads);
  auto row = [&](int64_t i) { return static_cast<const T*>(p.qkv) + i * p.stride; };
  auto key_row = [&](int64_t i, int64_t h) { return row(i) + (p.q_heads + h) * size; };
  auto value = [&](int64_t i, int64_t h) { return key_row(i, heads + h); };
  auto queries = [&](int64_t i) { return static_cast<T*>(p.q_out) + i * p.q_heads * size; };
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, bf16>)
    if (WholeHeads::fit(prepare)) {
      const WholeHeads query(prepare, p.q_norm), key(prepare, p.k_norm);
      const int64_t count = part.end_head - part.first_head;
      auto keys = static_cast<bf16*>(scratch(kKeysOfTask, (end - begin) * count * size * 2));
      auto key_at = [&](int64_t i, int64_t h) {
        return keys + ((i - begin) * count + h - part.first_head) * size;
      };
      for (int64_t i = begin; i < end; i++) {
        const T* next = row(i + kTokensAhead < end ? i + kTokensAhead : i);
        if (all)
          for (int64_t k = 0; k < (p.q_heads + 2 * heads) * size; k += 32)
            __builtin_prefetch(next + k, 0, 2);
        query(row(i) + first * size, last - first, i, queries(i) + first * size);
        key(key_row(i, part.first_head), count, i, key_at(i, part.first_head));
      }
      return write_tokens<E, T>(
          p.cache, p.slots, part, size, size,
          [&](int64_t i, int64_t h, T*) { return key_at(i, h); }, value);
    }
#endif
  for (int64_t i = begin; i < end; i++)
    for (int64_t h = first; h < last; h++)
      prepare(row(i) + h * size, p.q_norm, i, queries(i) + h * size);
  write_tokens<E, T>(
      p.cache, p.slots, part, size, size,
      [&](int64_t i, int64_t h, T* to) -> const T* {
        prepare(key_row(i, h), p.k_norm, i, to);
        return to;
      },
      value);
}

}  // namespace

void Projections::prepare(const Part& part) const {
  with_float(dtype, [&](auto t) {
    with_cache(cache.dtype,
               [&](auto e) { prepare_part<decltype(e), decltype(t)>(*this, part); });
  });
}

void Projections::fetch(const Part& part) const {
  for (int64_t i = part.begin; i < part.end; i++) {
    if (slots[i] < 0 || (i > part.begin && slots[i] / cache.block == slots[i - 1] / cache.block))
      continue;
    const int64_t id = slots[i] / cache.block;
    const volatile uint8_t* at = cache.keys(id, part.first_head);
    const int64_t bytes = (part.end_head - part.first_head) * cache.head_bytes();
    for (int64_t b = 0; b < bytes; b += 64) (void)at[b];
  }
}

// A part is a run of tokens with all heads, or with some of them if there are fewer runs than threads:
// the lines that a token is written to are seldom in a cache, and one thread waits longer for them.
void Projections::prepare() const {
  const int64_t heads = cache.heads;
  const int64_t each = std::max<int64_t>(grain(tokens, (q_heads + 2 * heads) * size), 1);
  const int64_t runs = div_up(tokens, each);
  const bool divided = runs && runs < threads() && q_heads % heads == 0;
  const int64_t parts = divided ? std::min(threads() / runs, heads) : 1;
  parallel(runs * parts, [&](int64_t task, int) {
    const int64_t begin = task / parts * each, part = task % parts;
    prepare({begin, std::min(begin + each, tokens), part * heads / parts,
             (part + 1) * heads / parts});
  });
}

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
        write_tokens<E, T>(
            cache, slots, {begin, end, 0, heads}, size, value_size,
            [&](int64_t i, int64_t h, T*) {
              return static_cast<const T*>(k) + i * k_token + h * k_head;
            },
            [&](int64_t i, int64_t h) {
              return static_cast<const T*>(v) + i * v_token + h * v_head;
            });
      });
    });
  });
}

// As the fields of Projections.
MODULM_API void modulm_qkv_prepare(const void* qkv, int64_t stride, int64_t tokens, int64_t q_heads,
                                   int64_t size, int dtype, const void* q_norm,
                                   const void* k_norm, int norm_dtype, float eps, float offset,
                                   const void* table, int64_t turned, int table_dtype,
                                   const int64_t* positions, int neox, void* data, int64_t heads,
                                   int64_t block, int64_t padded, int64_t padded_value, int latent,
                                   int cache_dtype, const int64_t* slots, void* q_out) {
  projections(qkv, stride, tokens, q_heads, size, dtype, q_norm, k_norm, norm_dtype, eps, offset,
              table, turned, table_dtype, positions, neox, data, heads, block, padded, padded_value,
              latent, cache_dtype, slots, q_out)
      .prepare();
}

MODULM_REPLAYABLE(write_kv)
MODULM_REPLAYABLE(qkv_prepare)
