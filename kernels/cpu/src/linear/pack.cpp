// Packing of plain [N, K] matrices, done once when a model is loaded.
#include <cstring>

#include "base/pool.h"
#include "linear/weight.h"

namespace modulm {
namespace {

template <class T>
T at(const T* source, int64_t stride, const Weight& w, int64_t column, int64_t k) {
  return column < w.n && k < w.k ? source[column * stride + k] : T{0};
}

template <class T>
void pack_pairs(const T* source, int64_t stride, const Weight& w, T* target) {
  parallel(w.panels(), [&](int64_t p, int) {
    int width = w.width(p);
    T* to = target + p * kPanel * w.padded_k();
    for (int c = 0; c < width; c++)
      for (int64_t k = 0; k < w.padded_k(); k += 2)
        for (int half = 0; half < 2; half++)
          to[(k / 2 * width + c) * 2 + half] = at(source, stride, w, p * kPanel + c, k + half);
  });
}

// Source: one code of 0..15 per byte. Padding is code 8, which stands for 0.
void pack_nibbles(const uint8_t* source, int64_t stride, const Weight& w, uint32_t* target) {
  parallel(w.panels(), [&](int64_t p, int) {
    int width = w.width(p);
    uint32_t* to = target + p * kPanel * w.padded_k() / 8;
    for (int c = 0; c < width; c++)
      for (int64_t k = 0; k < w.padded_k(); k += 8) {
        uint32_t lane = 0;
        for (int i = 0; i < 8; i++) {
          bool inside = p * kPanel + c < w.n && k + i < w.k;
          uint32_t code = inside ? at(source, stride, w, p * kPanel + c, k + i) & 15u : 8u;
          lane |= code << (4 * (i / 2 + 4 * (i % 2)));
        }
        to[k / 8 * width + c] = lane;
      }
  });
}

template <class T>
void unpack_pairs(const T* source, const Weight& w, T* target) {
  parallel_runs(w.n, 16, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) {
      int64_t p = c / kPanel;
      const T* from = source + p * kPanel * w.padded_k() + (c - p * kPanel) * 2;
      for (int64_t k = 0; k < w.k; k++)
        target[c * w.k + k] = from[k / 2 * w.width(p) * 2 + k % 2];
    }
  });
}

void unpack_nibbles(const uint32_t* source, const Weight& w, uint8_t* target) {
  parallel_runs(w.n, 16, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) {
      int64_t p = c / kPanel;
      const uint32_t* from = source + p * kPanel * w.padded_k() / 8 + (c - p * kPanel);
      for (int64_t k = 0; k < w.k; k++) {
        uint32_t lane = from[k / 8 * w.width(p)];
        target[c * w.k + k] = lane >> (4 * (k % 8 / 2 + 4 * (k % 2))) & 15u;
      }
    }
  });
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// Bytes that a packed matrix takes, without its scales.
MODULM_API int64_t modulm_packed_bytes(int64_t n, int64_t k, int format) {
  Weight w{nullptr, nullptr, nullptr, n, k, 0, format};
  return w.padded_n() * w.padded_k() * w.bits() / 8;
}

// source: [n, k] with row stride `stride` in elements (bf16, int8, e4m3 or codes in bytes).
MODULM_API void modulm_pack(const void* source, int64_t stride, void* target, int64_t n, int64_t k,
                            int format) {
  Weight w{nullptr, nullptr, nullptr, n, k, 0, format};
  if (format == kWeightBF16)
    pack_pairs(static_cast<const uint16_t*>(source), stride, w, static_cast<uint16_t*>(target));
  else if (format == kWeightInt4)
    pack_nibbles(static_cast<const uint8_t*>(source), stride, w, static_cast<uint32_t*>(target));
  else
    pack_pairs(static_cast<const uint8_t*>(source), stride, w, static_cast<uint8_t*>(target));
}

// The inverse: target [n, k], contiguous.
MODULM_API void modulm_unpack(const void* source, void* target, int64_t n, int64_t k, int format) {
  Weight w{nullptr, nullptr, nullptr, n, k, 0, format};
  if (format == kWeightBF16)
    unpack_pairs(static_cast<const uint16_t*>(source), w, static_cast<uint16_t*>(target));
  else if (format == kWeightInt4)
    unpack_nibbles(static_cast<const uint32_t*>(source), w, static_cast<uint8_t*>(target));
  else
    unpack_pairs(static_cast<const uint8_t*>(source), w, static_cast<uint8_t*>(target));
}
