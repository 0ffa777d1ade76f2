// The paged cache of one layer, and how the key and value of a token are written to it.
//
// [block][kv head], and then, each contiguous: the block's keys, its values, and for int8 codes an
// fp32 scale per key and one per value. Heads are padded to a multiple of 32 dimensions with
// zeros; a block has a multiple of 32 tokens.
//
//   bf16, fp8   keys [D / 2][token][2], values [token / 2][Dv][2]: both are right-hand sides of the
//               pair product as they lie, for one query or many, and nothing is shuffled
//   scaled e4m3   the same bytes as fp8, and scales as for int8
//   int8        keys [D / 4][token][4] plus 128, values [token / 4][Dv][4]: the same for bytes
//   fp32, fp16  keys [D][token], values [token][Dv]
//
// A latent cache (DeepSeek-V2, arXiv 2405.04434) has one head and one vector per token, stored
// like a value: the first of its dimensions are the value, all of them the key.
#pragma once

#include <type_traits>

#include "attention/codes.h"
#include "attention/transpose.h"

namespace modulm {

// Codes of the C ABI beside those of base/types.h.
enum CacheDtype : int { kE4M3 = kFP8, kE5M2 = 4, kInt8 = 5, kScaledE4M3 = 6 };

struct Int8 {
  int8_t bits;
};
struct ScaledE4M3 {
  uint8_t bits;
};

struct Cache {
  uint8_t* data;
  int64_t heads, block, size, value_size;  // padded sizes
  int dtype;
  bool latent;

  bool scaled() const { return dtype == kInt8 || dtype == kScaledE4M3; }
  bool paired() const {
    return dtype == kBF16 || dtype == kE4M3 || dtype == kE5M2 || dtype == kScaledE4M3;
  }
  int64_t element() const { return dtype >= kE4M3 ? 1 : dtype == kF32 ? 4 : 2; }
  int64_t key_bytes() const { return latent ? 0 : block * size * element(); }
  int64_t head_bytes() const {
    return key_bytes() + block * (value_size * element() + (scaled() ? 8 : 0));
  }
  uint8_t* keys(int64_t id, int64_t head) const {
    return data + (id * heads + head) * head_bytes();
  }
  uint8_t* values(int64_t id, int64_t head) const { return keys(id, head) + key_bytes(); }
  // Of the block's keys; those of its values follow.
  float* scales(int64_t id, int64_t head) const {
    return reinterpret_cast<float*>(values(id, head) + block * value_size);
  }
};

// The nearest integer of x, ties to even, for |x| < 2^22.
inline vi nearest(vf x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  return (vi)(x + magic) - 0x4b400000;
}

// One token of one head, padded with zeros, as elements of the cache; returns the scale.
template <class E, class T>
inline float encode(const T* from, int64_t used, int64_t size, E* to) {
  float scale = 1.0f, inverse = 1.0f;
  constexpr bool eight = std::is_same<E, ScaledE4M3>::value;
  if constexpr (std::is_same<E, Int8>::value || eight) {
    vf peak{};
    for_lanes(used, [&](int64_t i, int n) {
      vf x = load_n(from + i, n);
      peak = vmax(peak, vmax(x, -x));
    });
    scale = largest(peak) / (eight ? 448.0f : 127.0f);
    inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
  }
  for_lanes(used, [&](int64_t i, int n) {
    vf x = load_n(from + i, n);
    if constexpr (std::is_same<E, Int8>::value) {
      vb codes = narrow_bytes((vu)nearest(x * inverse));
      std::memcpy(to + i, &codes, n);
    } else if constexpr (eight) {
      vb codes = narrow_bytes(narrow_code(x * inverse, E4M3{}));
      std::memcpy(to + i, &codes, n);
    } else if constexpr (sizeof(E) == 1) {
      vb codes = narrow_bytes(narrow_code(x, E{}));
      std::memcpy(to + i, &codes, n);
    } else {
      store_n(to + i, x, n);
    }
  });
  std::memset(to + used, 0, (size - used) * sizeof(E));
  return scale;
}

// Adjacent elements in a line of 2 or 4 bytes.
template <class E>
inline constexpr int kTogether =
    std::is_same<E, Int8>::value ? 4 : sizeof(E) == 1 || std::is_same<E, bf16>::value ? 2 : 1;

template <class E>
inline void scatter_key(const Cache& c, E* keys, int64_t at, const E* from) {
  constexpr int n = kTogether<E>;
  struct Group {
    E all[n];
  };
  auto to = reinterpret_cast<Group*>(keys) + at;
  for (int64_t d = 0; d < c.size / n; d++) {
    Group group = load_raw<Group>(from + n * d);
    if constexpr (std::is_same<E, Int8>::value)
      for (E& code : group.all) code.bits = int8_t(code.bits ^ 0x80);
    to[d * c.block] = group;
  }
}

template <class E>
inline void scatter_value(const Cache& c, E* values, int64_t at, const E* from) {
  constexpr int n = kTogether<E>;
  E* to = values + at / n * c.value_size * n + at % n;
  for (int64_t d = 0; d < c.value_size; d++) to[n * d] = from[d];
}

constexpr int64_t kMaxSize = 1024;  // of a head

// Writes one token's key [size] and value [value_size] of one head; a latent token is its key.
template <class E, class K, class V>
inline void put_token(const Cache& c, int64_t slot, int64_t head, const K* k, int64_t size,
                      const V* v, int64_t value_size) {
  int64_t id = slot / c.block, at = slot % c.block;
  E row[kMaxSize];
  float scale = encode(k, size, c.size, row);
  if (c.latent) return scatter_value(c, reinterpret_cast<E*>(c.values(id, head)), at, row);
  scatter_key(c, reinterpret_cast<E*>(c.keys(id, head)), at, row);
  if (c.scaled()) c.scales(id, head)[at] = scale;
  scale = encode(v, value_size, c.value_size, row);
  scatter_value(c, reinterpret_cast<E*>(c.values(id, head)), at, row);
  if (c.scaled()) c.scales(id, head)[c.block + at] = scale;
}

// Adjacent tokens of a block that are written together.
constexpr int64_t kNeighbours = 16;

// Keys [kNeighbours][size], padded, of bf16 pairs, from token `at` of a block on, a multiple.
// stride: between keys, in elements; even.
inline void scatter_keys(const Cache& c, bf16* keys, int64_t at, const bf16* from, int64_t stride) {
  transpose(reinterpret_cast<const float*>(from), stride / 2, kNeighbours, c.size / 2,
            reinterpret_cast<float*>(keys) + at, c.block);
}

// Values of two tokens, the first an even one.
inline void scatter_pair(const Cache& c, bf16* values, int64_t at, const bf16* first,
                         const bf16* second) {
  auto to = reinterpret_cast<uint32_t*>(values) + at / 2 * c.value_size;
  for (int64_t d = 0; d < c.value_size; d += kLanes) {
    vu low = __builtin_convertvector(load_raw<vh>(first + d), vu);
    vu high = __builtin_convertvector(load_raw<vh>(second + d), vu);
    store_raw(to + d, low | high << 16);
  }
}

template <class F>
inline void with_cache(int dtype, F&& f) {
  switch (dtype) {
    case kE4M3: f(E4M3{}); break;
    case kE5M2: f(E5M2{}); break;
    case kInt8: f(Int8{}); break;
    case kScaledE4M3: f(ScaledE4M3{}); break;
    default: with_float(dtype, f);
  }
}

// For codes that are decoded: eight-bit floats.
template <class F>
inline void with_code(int dtype, F&& f) {
  if (dtype == kE5M2) f(E5M2{});
  else f(E4M3{});
}

}  // namespace modulm
