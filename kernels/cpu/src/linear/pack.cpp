// Packing of plain [N, K] matrices, done once when a model is loaded.
#include <cstring>

#include "base/pool.h"
#include "linear/weight.h"

namespace modulm {
namespace {

constexpr uint8_t kFlip = 0x80;  // adds 128 to an int8 code, as a byte

template <class T>
T at(const T* source, int64_t stride, const Weight& w, int64_t column, int64_t k) {
  return column < w.n && k < w.k ? source[column * stride + k] : T{0};
}

// `Along` successive k side by side; `flip` is xored to every code, padding included.
template <int Along, class T>
void pack_lanes(const T* source, int64_t stride, const Weight& w, T* target, T flip = 0) {
  constexpr int64_t kBlock = 64;  // k at a time: a block's source and target stay cached
  parallel(w.panels(), [&](int64_t p, int) {
    int width = w.width(p);
    T* to = target + p * kPanel * w.padded_k();
    for (int64_t first = 0; first < w.padded_k(); first += kBlock) {
      for (int c = 0; c < width; c++) {
        int64_t column = p * kPanel + c;
        bool inside = column < w.n && first + kBlock <= w.k;
        const T* row = source + (inside ? column * stride : 0);
        for (int64_t k = first; k < first + kBlock; k += Along)
          for (int i = 0; i < Along; i++)
            to[(k / Along * width + c) * Along + i] =
                (inside ? row[k + i] : at(source, stride, w, column, k + i)) ^ flip;
      }
    }
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

template <int Along, class T>
void unpack_lanes(const T* source, const Weight& w, T* target, T flip = 0) {
  parallel_runs(w.n, 16, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) {
      int64_t p = c / kPanel;
      const T* from = source + p * kPanel * w.padded_k() + (c - p * kPanel) * Along;
      for (int64_t k = 0; k < w.k; k++)
        target[c * w.k + k] = from[k / Along * w.width(p) * Along + k % Along] ^ flip;
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
MODULM_API int64_t modulm_packed_bytes(int64_t n, int64_t k, int form) {
  Weight w = weight_of(nullptr, nullptr, nullptr, n, k, 0, form);
  return w.padded_n() * w.padded_k() * w.bits() / 8;
}

// source: [n, k] with row stride `stride` in elements (floats, int8, e4m3 or codes in bytes).
MODULM_API void modulm_pack(const void* source, int64_t stride, void* target, int64_t n, int64_t k,
                            int form) {
  Weight w = weight_of(nullptr, nullptr, nullptr, n, k, 0, form);
  auto bytes = static_cast<const uint8_t*>(source);
  auto halves = static_cast<const uint16_t*>(source);
  auto words = static_cast<const uint32_t*>(source);
  auto to = static_cast<uint8_t*>(target);
  switch (w.format) {
    case kWeightBF16: return pack_lanes<2>(halves, stride, w, static_cast<uint16_t*>(target));
    case kWeightFP16: return pack_lanes<1>(halves, stride, w, static_cast<uint16_t*>(target));
    case kWeightFP32: return pack_lanes<1>(words, stride, w, static_cast<uint32_t*>(target));
    case kWeightFP8: return pack_lanes<2>(bytes, stride, w, to);
    case kWeightInt8: return pack_lanes<4>(bytes, stride, w, to, kFlip);
    default: return pack_nibbles(bytes, stride, w, static_cast<uint32_t*>(target));
  }
}

// The inverse: target [n, k], contiguous.
MODULM_API void modulm_unpack(const void* source, void* target, int64_t n, int64_t k, int form) {
  Weight w = weight_of(nullptr, nullptr, nullptr, n, k, 0, form);
  auto bytes = static_cast<const uint8_t*>(source);
  auto halves = static_cast<const uint16_t*>(source);
  auto words = static_cast<const uint32_t*>(source);
  auto to = static_cast<uint8_t*>(target);
  switch (w.format) {
    case kWeightBF16: return unpack_lanes<2>(halves, w, static_cast<uint16_t*>(target));
    case kWeightFP16: return unpack_lanes<1>(halves, w, static_cast<uint16_t*>(target));
    case kWeightFP32: return unpack_lanes<1>(words, w, static_cast<uint32_t*>(target));
    case kWeightFP8: return unpack_lanes<2>(bytes, w, to);
    case kWeightInt8: return unpack_lanes<4>(bytes, w, to, kFlip);
    default: return unpack_nibbles(words, w, to);
  }
}
