// Packing of one expert's part [N, K] into its place in a stack, done once when a model is loaded.
#include <cstring>

#include "base/pool.h"
#include "moe/stack.h"

namespace modulm {
namespace {

// Where nibble k % 8 of a column lies in its lane.
inline int nibble_shift(int64_t k) { return int(4 * (k % 8 / 2 + 4 * (k % 2))); }

template <class T>
void pack_pairs(const T* source, const Stack& s, T* target) {
  for (int64_t p = 0; p < s.panels(); p++) {
    int width = s.width(p);
    T* to = target + p * kPanel * s.padded_k();
    for (int64_t c = 0; c < width && p * kPanel + c < s.n; c++) {
      const T* from = source + (p * kPanel + c) * s.k;
      for (int64_t k = 0; k < s.k; k++) to[(k / 2 * width + c) * 2 + k % 2] = from[k];
    }
  }
}

template <class T>
void unpack_pairs(const T* source, const Stack& s, T* target) {
  for (int64_t column = 0; column < s.n; column++) {
    int64_t p = column / kPanel, c = column % kPanel;
    const T* from = source + p * kPanel * s.padded_k();
    for (int64_t k = 0; k < s.k; k++)
      target[column * s.k + k] = from[(k / 2 * s.width(p) + c) * 2 + k % 2];
  }
}

template <class T>
void pack_plain(const T* source, const Stack& s, T* target) {
  for (int64_t p = 0; p < s.panels(); p++) {
    int width = s.width(p);
    T* to = target + p * kPanel * s.padded_k();
    for (int64_t c = 0; c < width && p * kPanel + c < s.n; c++)
      for (int64_t k = 0; k < s.k; k++) to[k * width + c] = source[(p * kPanel + c) * s.k + k];
  }
}

template <class T>
void unpack_plain(const T* source, const Stack& s, T* target) {
  for (int64_t column = 0; column < s.n; column++) {
    int64_t p = column / kPanel, c = column % kPanel;
    const T* from = source + p * kPanel * s.padded_k();
    for (int64_t k = 0; k < s.k; k++) target[column * s.k + k] = from[k * s.width(p) + c];
  }
}

// Codes two to a byte, the even k in the low nibble. Padding has the code `none`.
void pack_nibbles(const uint8_t* source, const Stack& s, uint32_t none, uint32_t* target) {
  for (int64_t p = 0; p < s.panels(); p++) {
    int width = s.width(p);
    uint32_t* to = target + p * kPanel * s.padded_k() / 8;
    for (int64_t c = 0; c < width; c++)
      for (int64_t k = 0; k < s.padded_k(); k += 8) {
        uint32_t lane = 0;
        for (int64_t i = k; i < k + 8; i++) {
          bool inside = p * kPanel + c < s.n && i < s.k;
          int64_t at = (p * kPanel + c) * s.k + i;
          uint32_t code = inside ? source[at / 2] >> (at % 2 * 4) & 15u : none;
          lane |= code << nibble_shift(i);
        }
        to[k / 8 * width + c] = lane;
      }
  }
}

void unpack_nibbles(const uint32_t* source, const Stack& s, uint8_t* target) {
  for (int64_t column = 0; column < s.n; column++) {
    int64_t p = column / kPanel, c = column % kPanel;
    const uint32_t* from = source + p * kPanel * s.padded_k() / 8;
    for (int64_t k = 0; k < s.k; k++)
      target[column * s.k + k] = from[k / 8 * s.width(p) + c] >> nibble_shift(k) & 15u;
  }
}

Stack one(int64_t n, int64_t k, int format) {
  return {nullptr, nullptr, nullptr, 1, 1, n, k, kMXBlock, format};
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// Bytes that one matrix takes, without its scales.
MODULM_API int64_t modulm_expert_bytes(int64_t n, int64_t k, int format) {
  Stack s = one(n, k, format);
  return s.bytes(s.padded_k(), s.padded_n());
}

// source: `count` matrices [n, k] of floats, int8, or nibbles two to a byte (k is even then); target
// starts zeroed.
MODULM_API void modulm_pack_experts(const uint8_t* source, uint8_t* target, int64_t count, int64_t n,
                                    int64_t k, int format) {
  Stack s = one(n, k, format);
  int64_t from_bytes = s.bytes(8, n) * k / 8, to_bytes = s.bytes(s.padded_k(), s.padded_n());
  parallel(count, [&](int64_t i, int) {
    const uint8_t* from = source + i * from_bytes;
    uint8_t* to = target + i * to_bytes;
    if (format == kStackBF16)
      pack_pairs(reinterpret_cast<const uint16_t*>(from), s, reinterpret_cast<uint16_t*>(to));
    else if (format == kStackFP32)
      pack_plain(reinterpret_cast<const uint32_t*>(from), s, reinterpret_cast<uint32_t*>(to));
    else if (format == kStackFP16)
      pack_plain(reinterpret_cast<const uint16_t*>(from), s, reinterpret_cast<uint16_t*>(to));
    else if (format == kStackInt8) pack_pairs(from, s, to);
    else
      pack_nibbles(from, s, format == kStackInt4 ? 8 : 0, reinterpret_cast<uint32_t*>(to));
  });
}

// One matrix: target [n, k] of floats, int8, or one code per byte.
MODULM_API void modulm_unpack_expert(const uint8_t* source, uint8_t* target, int64_t n, int64_t k,
                                     int format) {
  Stack s = one(n, k, format);
  if (format == kStackBF16)
    unpack_pairs(reinterpret_cast<const uint16_t*>(source), s, reinterpret_cast<uint16_t*>(target));
  else if (format == kStackFP32)
    unpack_plain(reinterpret_cast<const uint32_t*>(source), s, reinterpret_cast<uint32_t*>(target));
  else if (format == kStackFP16)
    unpack_plain(reinterpret_cast<const uint16_t*>(source), s, reinterpret_cast<uint16_t*>(target));
  else if (format == kStackInt8) unpack_pairs(source, s, target);
  else unpack_nibbles(reinterpret_cast<const uint32_t*>(source), s, target);
}
