// The norm and the rotation of queries and keys before they are used or cached.
#pragma once

#include "norm/norm.h"
#include "rope/rope.h"

namespace modulm {

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

#if defined(__AVX512F__)
// Heads in bf16 that stay in registers between the norm and the rotation, which turns all of a head.
// The results are those of `Preparation`.
class WholeHeads {
 public:
  static bool fit(const Preparation& p) {
    return (p.size == 64 || p.size == 128 || p.size == 256) &&
           (!p.table || (p.neox && p.turned == p.size));
  }

  WholeHeads(const Preparation& p, const void* norm) : p_(p), normed_(norm != nullptr) {
    if (!norm) return;
    auto widened = [&](auto weight) {
      for_lanes(p.size, [&](int64_t i, int) { store(gain_ + i, load(weight + i) + p.offset); });
    };
    if (p.norm_dtype == kF32) widened(static_cast<const float*>(norm));
    else widened(static_cast<const bf16*>(norm));
  }

  // Heads of one token that lie side by side, and so do the results.
  void operator()(const bf16* from, int64_t heads, int64_t token, bf16* to) const {
    const float* table = nullptr;
    alignas(64) float wide[kMost];
    if (p_.table) {
      const int64_t row = p_.positions[token] * p_.turned;
      table = static_cast<const float*>(p_.table) + row;
      if (p_.table_dtype != kF32) {
        auto narrow = static_cast<const bf16*>(p_.table) + row;
        for_lanes(p_.size, [&](int64_t i, int) { store(wide + i, load(narrow + i)); });
        table = wide;
      }
    }
    switch (p_.size) {
      case 64: return each<64>(from, heads, table, to);
      case 128: return each<128>(from, heads, table, to);
      case 256: return each<256>(from, heads, table, to);
    }
  }

 private:
  static constexpr int kMost = 256, kTogether = 8;

  // Of up to kTogether heads: a root and a division take long, but those of several heads overlap.
  template <int Size>
  void factors_of(const bf16* from, int64_t heads, float* factors) const {
    for (int64_t h = 0; h < heads && h < kTogether; h++, from += Size) {
      vf squares[4] = {};
#pragma GCC unroll 16
      for (int i = 0; i < Size / kLanes; i++) {
        const vf v = load(from + i * kLanes);
        squares[i & 3] += v * v;
      }
      const vf total = (squares[0] + squares[1]) + (squares[2] + squares[3]);
      factors[h] = 1.0f / std::sqrt(sum(total) / float(Size) + p_.eps);
    }
  }

  template <int Size>
  [[gnu::noinline]] void each(const bf16* from, int64_t heads, const float* table, bf16* to) const {
    constexpr int count = Size / kLanes, half = count / 2;
    float factors[kTogether];
    for (int64_t h = 0; h < heads; h++, from += Size, to += Size) {
      vf x[count];
#pragma GCC unroll 16
      for (int i = 0; i < count; i++) x[i] = load(from + i * kLanes);
      if (normed_) {
        if (h % kTogether == 0) factors_of<Size>(from, heads - h, factors);
        const float factor = factors[h % kTogether];
#pragma GCC unroll 16
        for (int i = 0; i < count; i++) {
          const vf y = x[i] * factor;
          x[i] = widen(narrow(y * load(gain_ + i * kLanes), bf16{}), bf16{});
        }
      }
      if (!table) {
#pragma GCC unroll 16
        for (int i = 0; i < count; i++) store(to + i * kLanes, x[i]);
        continue;
      }
#pragma GCC unroll 16
      for (int i = 0; i < half; i++) {
        const vf cos = load(table + i * kLanes), sin = load(table + Size / 2 + i * kLanes);
        const vf a = x[i], b = x[half + i];
        store(to + i * kLanes, a * cos - b * sin);
        store(to + (half + i) * kLanes, b * cos + a * sin);
      }
    }
  }

  const Preparation& p_;
  bool normed_;
  alignas(64) float gain_[kMost];
};
#endif

}  // namespace modulm
