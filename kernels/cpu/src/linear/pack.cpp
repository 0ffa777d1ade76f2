// Packing of plain [N, K] matrices: when a model is loaded, and when its weights are updated.
#include <cstring>

#include "base/pool.h"
#include "base/vec.h"
#include "linear/blocks.h"
#include "linear/weight.h"

namespace modulm {
namespace {

constexpr uint8_t kFlip = 0x80;  // adds 128 to an int8 code, as a byte

template <class T>
T at(const T* source, int64_t stride, const Weight& w, int64_t column, int64_t k) {
  return column < w.n && k < w.k ? source[column * stride + k] : T{0};
}

#if defined(__AVX2__)
// Eight rows of eight words become columns.
inline void turn_eight(const char* source, int64_t row_bytes, __m256i flip, __m256i* columns) {
  __m256i r[8], pairs[8], quads[8];
  for (int i = 0; i < 8; i++)
    r[i] = _mm256_xor_si256(flip, load_raw<__m256i>(source + i * row_bytes));
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      quads[i + 2 * j] = _mm256_unpacklo_epi64(pairs[i + j], pairs[i + 2 + j]);
      quads[i + 2 * j + 1] = _mm256_unpackhi_epi64(pairs[i + j], pairs[i + 2 + j]);
    }
  for (int i = 0; i < 4; i++) {
    columns[i] = _mm256_permute2x128_si256(quads[i], quads[i + 4], 0x20);
    columns[i + 4] = _mm256_permute2x128_si256(quads[i], quads[i + 4], 0x31);
  }
}

// Sixteen rows of sixteen words become columns; `to` is aligned to 32 bytes if `streamed`.
void turn_words(const char* source, int64_t row_bytes, uint32_t* to, int64_t width, uint32_t flip,
                bool streamed) {
  const __m256i flips = _mm256_set1_epi32(int(flip));
  for (int half = 0; half < 2; half++, source += 32) {
    __m256i first[8], second[8];
    turn_eight(source, row_bytes, flips, first);
    turn_eight(source + 8 * row_bytes, row_bytes, flips, second);
    for (int l = 0; l < 8; l++, to += width) {
      auto line = reinterpret_cast<__m256i*>(to);
      if (streamed) {
        _mm256_stream_si256(line, first[l]);
        _mm256_stream_si256(line + 1, second[l]);
      } else {
        _mm256_storeu_si256(line, first[l]);
        _mm256_storeu_si256(line + 1, second[l]);
      }
    }
  }
}
#endif

// Makes streamed stores visible to other threads.
inline void end_streams() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

constexpr int kSquare = 16;
// Bytes of a packed matrix from which on it is stored past the caches, which spares reading the
// lines that are overwritten. A smaller one may stay in a cache until it is used.
constexpr int64_t kStreamed = 1 << 20;

// Rows of 16 lanes become columns; `flip` is xored to every lane. `streamed`: past the caches.
template <class Lane>
void turn_square(const void* source, int64_t row_bytes, Lane* to, int64_t width, Lane flip,
                 [[maybe_unused]] bool streamed) {
#if defined(__AVX2__)
  if constexpr (sizeof(Lane) == 4)
    return turn_words(static_cast<const char*>(source), row_bytes, to, width, flip, streamed);
#endif
  Lane lanes[kSquare][kSquare];
  for (int c = 0; c < kSquare; c++)
    std::memcpy(lanes[c], static_cast<const char*>(source) + c * row_bytes, sizeof lanes[c]);
  for (int l = 0; l < kSquare; l++)
    for (int c = 0; c < kSquare; c++) to[l * width + c] = lanes[c][l] ^ flip;
}

// The same at the edges of a matrix, one code at a time.
template <int Along, class T>
void turn_edge(const T* source, int64_t stride, const Weight& w, int64_t column, int64_t k, T* to,
               int64_t width, T flip) {
  for (int l = 0; l < kSquare; l++)
    for (int c = 0; c < kSquare; c++)
      for (int i = 0; i < Along; i++)
        to[(l * width + c) * Along + i] =
            at(source, stride, w, column + c, k + l * Along + i) ^ flip;
}

// `Along` successive k make a lane; `flip` is xored to every code, padding included. Columns are
// packed sixteen at a time, from end to end: as many rows of the source are read together.
template <class Lane, int Along, class T>
void pack_lanes(const T* source, int64_t stride, const Weight& w, T* target, T flip = 0) {
  static_assert(sizeof(Lane) == Along * sizeof(T), "a lane holds `Along` codes");
  Lane flips = 0;
  for (int i = 0; i < Along; i++) flips |= Lane(Lane(flip) << (8 * sizeof(T) * i) % 32);
  const bool streamed = w.bytes(w.padded_k(), w.padded_n()) >= kStreamed &&
                        reinterpret_cast<uintptr_t>(target) % 32 == 0;
  parallel(w.panels(), [&](int64_t p, int) {
    int width = w.width(p);
    T* panel = target + p * kPanel * w.padded_k();
    for (int c = 0; c < width; c += kSquare) {
      int64_t column = p * kPanel + c;
      for (int64_t k = 0; k < w.padded_k(); k += kSquare * Along) {
        T* to = panel + k * width + c * Along;
        if (column + kSquare <= w.n && k + kSquare * Along <= w.k) {
          turn_square(source + column * stride + k, stride * int64_t(sizeof(T)),
                      reinterpret_cast<Lane*>(to), width, flips, streamed);
        } else turn_edge<Along>(source, stride, w, column, k, to, width, flip);
      }
    }
    if (streamed) end_streams();
  });
}

// Eight codes of 0..15, a byte each, as one packed lane.
inline uint32_t lane_of(uint64_t codes) {
  auto squeeze = [](uint64_t x) {  // four nibbles 16 bits apart
    x = (x | x >> 12) & 0x000000ff000000ffu;
    return uint32_t(x | x >> 24) & 0xffffu;
  };
  const uint64_t even = 0x000f000f000f000fu;
  return squeeze(codes & even) | squeeze(codes >> 8 & even) << 16;
}

// Source: one code of 0..15 per byte. Padding is code 8, which means 0 for plain nibbles.
void pack_nibbles(const uint8_t* source, int64_t stride, const Weight& w, uint32_t* target) {
  constexpr int deep = 8;  // lanes of a column at a time: a cache line of codes
  parallel(w.panels(), [&](int64_t p, int) {
    int width = w.width(p);
    uint32_t* panel = target + p * kPanel * w.padded_k() / 8;
    for (int first = 0; first < width; first += kSquare)
      for (int64_t k = 0; k < w.padded_k(); k += 8 * deep) {
        uint32_t lanes[deep][kSquare];
        for (int c = 0; c < kSquare; c++) {
          int64_t column = p * kPanel + first + c;
          uint64_t codes[deep];
          std::memset(codes, 8, sizeof codes);
          int64_t there = column < w.n ? w.k - k : 0;
          if (there > 0)
            std::memcpy(codes, source + column * stride + k, there < 8 * deep ? there : 8 * deep);
          for (int l = 0; l < deep; l++) lanes[l][c] = lane_of(codes[l]);
        }
        for (int l = 0; l < deep; l++)
          std::memcpy(panel + (k / 8 + l) * width + first, lanes[l], sizeof lanes[l]);
      }
  });
}

// ggml's block_q4_K, block_q5_K and block_q6_K (ggml-common.h): offsets of their parts, in bytes.
struct Stored {
  int nibbles, high, scales, d;
};
constexpr Stored kStored[] = {{16, 0, 4, 0}, {48, 16, 4, 0}, {0, 128, 192, 208}};

// The codes of a block, a byte each.
void block_values(const uint8_t* block, int format, const Stored& at, uint8_t* codes) {
  const bool six = format == kWeightQ6K;
  const int span = six ? 64 : 32;  // bytes whose low nibbles come before their high ones
  for (int k = 0; k < kStep; k++) {
    const int byte = k / (2 * span) * span + k % span;
    codes[k] = block[at.nibbles + byte] >> (k / span % 2 * 4) & 15;
    if (six) codes[k] |= (block[at.high + k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3) << 4;
    else if (format == kWeightQ5K) codes[k] |= (block[at.high + k % 32] >> (k / 32) & 1) << 4;
  }
}

// Four bits each of two quads.
uint32_t nibble_lane(const uint8_t* codes) {
  uint32_t lane = 0;
  for (int i = 0; i < 8; i++) lane |= uint32_t(codes[i] & 15) << (8 * (i % 4) + 4 * (i / 4));
  return lane;
}
// The fifth bits of eight quads.
uint32_t fifth_lane(const uint8_t* codes) {
  uint32_t lane = 0;
  for (int i = 0; i < 32; i++) lane |= uint32_t(codes[i] >> 4) << (8 * (i % 4) + i / 4);
  return lane;
}
// Six bits of quad `i` of 16 codes and two of the last quad.
uint32_t six_lane(const uint8_t* codes, int i) {
  uint32_t lane = 0;
  for (int b = 0; b < 4; b++)
    lane |= (codes[4 * i + b] | uint32_t(codes[12 + b] >> 2 * i & 3) << 6) << 8 * b;
  return lane;
}

void pack_block(const uint8_t* block, int format, uint32_t* to, int64_t width, int column) {
  const Stored& at = kStored[format - kWeightQ4K];
  uint8_t codes[kStep];
  block_values(block, format, at, codes);
  uint32_t* lanes = to + column;
  const bool six = format == kWeightQ6K;
  for (int i = 0; i < (six ? 4 : 3); i++, lanes += width)
    std::memcpy(lanes, block + at.scales + 4 * i, 4);
  auto floats = reinterpret_cast<uint16_t*>(lanes - column) + column;
  for (int i = 0; i < (six ? 1 : 2); i++, floats += width)
    std::memcpy(floats, block + at.d + 2 * i, 2);
  lanes = reinterpret_cast<uint32_t*>(floats - column) + column;
  auto put = [&](uint32_t lane) {
    *lanes = lane;
    lanes += width;
  };
  for (int k = 0; six && k < kStep; k += 16)
    for (int i = 0; i < 3; i++) put(six_lane(codes + k, i));
  for (int k = 0; !six && k < kStep; k += 8) {
    if (format == kWeightQ5K && k % 32 == 0) put(fifth_lane(codes + k));
    put(nibble_lane(codes + k));
  }
}

// Source: rows of blocks as they are stored. Columns beyond the last are zeros.
void pack_blocks(const uint8_t* source, int64_t stride, const Weight& w, uint8_t* target) {
  parallel(w.panels(), [&](int64_t p, int) {
    const int width = w.width(p);
    for (int64_t step = 0; step < w.steps(); step++) {
      auto to = target + w.bytes(w.padded_k(), kPanel) * p + w.bytes(step * kStep, width);
      auto lanes = reinterpret_cast<uint32_t*>(to);
      std::memset(to, 0, w.bytes(kStep, width));
      for (int c = 0; c < width && p * kPanel + c < w.n; c++)
        pack_block(source + (p * kPanel + c) * stride + step * w.block_bytes(), w.format, lanes,
                   width, c);
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

void unpack_blocks(const Weight& w, float* target) {
  parallel_runs(w.n, 16, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) block_column(w, c, target + c * w.k);
  });
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// Size of a packed matrix in bytes, without its scales.
MODULM_API int64_t modulm_packed_bytes(int64_t n, int64_t k, int form) {
  Weight w = weight_of(nullptr, nullptr, nullptr, n, k, 0, form);
  return w.bytes(w.padded_k(), w.padded_n());
}

// source: [n, k] with row stride `stride` in elements (floats, int8, e4m3 or codes in bytes), or
// rows of ggml's blocks, `stride` in bytes.
MODULM_API void modulm_pack(const void* source, int64_t stride, void* target, int64_t n, int64_t k,
                            int form) {
  Weight w = weight_of(nullptr, nullptr, nullptr, n, k, 0, form);
  auto bytes = static_cast<const uint8_t*>(source);
  auto halves = static_cast<const uint16_t*>(source);
  auto words = static_cast<const uint32_t*>(source);
  auto to = static_cast<uint8_t*>(target);
  auto halves_to = static_cast<uint16_t*>(target);
  auto words_to = static_cast<uint32_t*>(target);
  switch (w.format) {
    case kWeightBF16: return pack_lanes<uint32_t, 2>(halves, stride, w, halves_to);
    case kWeightFP16: return pack_lanes<uint16_t, 1>(halves, stride, w, halves_to);
    case kWeightFP32: return pack_lanes<uint32_t, 1>(words, stride, w, words_to);
    case kWeightFP8: return pack_lanes<uint16_t, 2>(bytes, stride, w, to);
    case kWeightInt8: return pack_lanes<uint32_t, 4>(bytes, stride, w, to, kFlip);
    case kWeightQ4K:
    case kWeightQ5K:
    case kWeightQ6K: return pack_blocks(bytes, stride, w, to);
    default: return pack_nibbles(bytes, stride, w, words_to);
  }
}

// The inverse: target [n, k], contiguous; of blocks fp32, scales and minima applied.
MODULM_API void modulm_unpack(const void* source, void* target, int64_t n, int64_t k, int form) {
  Weight w = weight_of(nullptr, nullptr, nullptr, n, k, 0, form);
  auto bytes = static_cast<const uint8_t*>(source);
  auto halves = static_cast<const uint16_t*>(source);
  auto words = static_cast<const uint32_t*>(source);
  auto to = static_cast<uint8_t*>(target);
  w.data = bytes;
  switch (w.format) {
    case kWeightQ4K:
    case kWeightQ5K:
    case kWeightQ6K: return unpack_blocks(w, static_cast<float*>(target));
    case kWeightBF16: return unpack_lanes<2>(halves, w, static_cast<uint16_t*>(target));
    case kWeightFP16: return unpack_lanes<1>(halves, w, static_cast<uint16_t*>(target));
    case kWeightFP32: return unpack_lanes<1>(words, w, static_cast<uint32_t*>(target));
    case kWeightFP8: return unpack_lanes<2>(bytes, w, to);
    case kWeightInt8: return unpack_lanes<4>(bytes, w, to, kFlip);
    default: return unpack_nibbles(words, w, to);
  }
}
