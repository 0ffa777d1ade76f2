// The paged cache of one layer, and how one token's key and value are put into it.
//
// [block][2][kv head][...]: first the keys of a block, then its values, each head contiguous. D is
// padded to a multiple of 32 with zeros; a block has a multiple of 32 tokens.
//
//   bf16, fp8   keys [D / 2][token][2], values [token / 2][D][2]: both are right-hand sides of the
//               pair product as they lie, for one query or many, and nothing is ever shuffled
//   fp32, fp16  keys [D][token], values [token][D]
#pragma once

#include <type_traits>

#include "base/vec.h"

namespace modulm {

struct Cache {
  uint8_t* data;
  int64_t heads, block, size;  // size: padded head size
  int dtype;

  bool paired() const { return dtype == kBF16 || dtype == kFP8; }
  int64_t element() const { return dtype == kFP8 ? 1 : dtype == kF32 ? 4 : 2; }
  int64_t part_bytes() const { return block * size * element(); }  // keys of one head and block
  uint8_t* keys(int64_t id, int64_t head) const {
    return data + (id * 2 * heads + head) * part_bytes();
  }
  uint8_t* values(int64_t id, int64_t head) const {
    return data + ((id * 2 + 1) * heads + head) * part_bytes();
  }
};

// Round to nearest even to e4m3; beyond 448 saturates, NaN stays.
inline uint8_t narrow_e4m3(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  uint8_t sign = uint8_t(u >> 24 & 0x80);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return sign | 0x7f;
  if (u >= 0x43e80000u) return sign | 0x7e;  // 464 and above
  if (u < 0x3c800000u) {                     // below 2^-6: steps of 2^-9, rounded by an addition
    float magnitude;
    std::memcpy(&magnitude, &u, 4);
    magnitude += 16384.0f;  // whose last bit is 2^-9
    std::memcpy(&u, &magnitude, 4);
    return sign | uint8_t(u - 0x46800000u);
  }
  u += 0x7ffffu + ((u >> 20) & 1u);
  return sign | uint8_t((u >> 20) - (120u << 3));
}

inline void store_one(fp8* p, float x) { p->bits = narrow_e4m3(x); }

// Writes one token's key and value of one head; k, v: [size_used], any float type.
template <class E, class K, class V>
inline void put_token(const Cache& cache, int64_t slot, int64_t head, const K* k, const V* v,
                      int64_t used) {
  int64_t id = slot / cache.block, at = slot % cache.block;
  auto keys = reinterpret_cast<E*>(cache.keys(id, head));
  auto values = reinterpret_cast<E*>(cache.values(id, head));
  constexpr bool paired = sizeof(E) == 1 || std::is_same<E, bf16>::value;
  for (int64_t d = 0; d < cache.size; d++) {
    float key = d < used ? load_one(k + d) : 0.0f, value = d < used ? load_one(v + d) : 0.0f;
    if (paired) {
      store_one(keys + (d / 2 * cache.block + at) * 2 + d % 2, key);
      store_one(values + (at / 2 * cache.size + d) * 2 + at % 2, value);
    } else {
      store_one(keys + d * cache.block + at, key);
      store_one(values + at * cache.size + d, value);
    }
  }
}

// The usual case without conversion: bf16 into bf16, keys a pair at a time.
template <>
inline void put_token<bf16, bf16, bf16>(const Cache& cache, int64_t slot, int64_t head,
                                        const bf16* k, const bf16* v, int64_t used) {
  int64_t id = slot / cache.block, at = slot % cache.block;
  auto keys = reinterpret_cast<uint32_t*>(cache.keys(id, head)) + at;
  auto values =
      reinterpret_cast<uint16_t*>(cache.values(id, head)) + at / 2 * cache.size * 2 + at % 2;
  for (int64_t d = 0; d + 2 <= used; d += 2)
    keys[d / 2 * cache.block] = load_raw<uint32_t>(k + d);
  if (used % 2) keys[used / 2 * cache.block] = k[used - 1].bits;
  for (int64_t d = div_up(used, 2); d < cache.size / 2; d++) keys[d * cache.block] = 0;
  for (int64_t d = 0; d < used; d++) values[d * 2] = v[d].bits;
  for (int64_t d = used; d < cache.size; d++) values[d * 2] = 0;
}

template <class F>
inline void with_cache(int dtype, F&& f) {
  if (dtype == kFP8) f(fp8{});
  else with_float(dtype, f);
}

}  // namespace modulm
