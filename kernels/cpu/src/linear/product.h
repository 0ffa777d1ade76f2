// One call of `linear`: the operands, and how sums become outputs.
#pragma once

#include "base/vec.h"
#include "linear/activations.h"
#include "linear/quad.h"
#include "linear/weight.h"

namespace modulm {

// Scratch slots: the caller's and, in the same thread, those of its tasks (5 to 7: activations.h).
enum Scratch { kInput, kSums, kGroupSums, kDecoded };

struct Product {
  const Weight& w;
  const void* x;  // bf16; fp32 for weights in fp32 and fp16; unused for integers
  int64_t ldx;
  const Activations& integers;
  const float* bias;
  void* out;
  int64_t ldo;
  int out_dtype;
  int64_t rows;
};

// Outputs larger than this are written past the caches: they would not stay there, and a line that
// is written whole need not be read first.
constexpr int64_t kStreamedBytes = 8 << 20;

#if defined(__AVX512F__)
constexpr bool kStreams = true;
// bytes: a multiple of 64. Other threads see them after `end_stream`.
inline void stream_out(const void* from, void* to, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(static_cast<char*>(to) + i),
                        _mm512_load_si512(static_cast<const char*>(from) + i));
}
inline void end_stream() { _mm_sfence(); }
#else
constexpr bool kStreams = false;
inline void stream_out(const void*, void*, int64_t) {}
inline void end_stream() {}
#endif

template <class T>
inline bool streams_out(const Product& p, int64_t columns) {
  const int64_t row = p.ldo * int64_t(sizeof(T));
  return kStreams && sizeof(T) == 2 && columns == kPanel && p.rows * row > kStreamedBytes &&
         row % 64 == 0 && reinterpret_cast<uintptr_t>(p.out) % 64 == 0;
}

// sums: [rows * sums_of_row][64].
template <class T>
inline void deliver(const Product& p, int64_t row, int64_t rows, int64_t panel, const float* sums) {
  int64_t column = panel * kPanel, left = p.w.n - column;
  int64_t columns = left < kPanel ? left : kPanel;
  const int64_t each = sums_of_row(p.w);
  bool scaled = p.w.scales && !p.w.grouped();
  auto scales = static_cast<const float*>(p.w.scales) + column;
  const bool streams = streams_out<T>(p, columns);
  alignas(64) T line[kPanel];
  for (int64_t r = 0; r < rows; r++) {
    T* const out = static_cast<T*>(p.out) + (row + r) * p.ldo + column;
    T* const to = streams ? line : out;
    const float* from = sums + r * each * kPanel;
    for_lanes(columns, [&](int64_t c, int n) {
      vf y = load(from + c);
      if (each == 2) y += load(from + kPanel + c);
      vf base = p.bias ? load_n(p.bias + column + c, n) : vf{};
      store_n(to + c, scaled ? fused(y, load(scales + c), base) : y + base, n);
    });
    if (streams) stream_out(line, out, sizeof(line));
  }
  if (streams) end_stream();
}

inline void deliver(const Product& p, int64_t row, int64_t rows, int64_t panel,
                    const float* sums) {
  with_float(p.out_dtype, [&](auto t) { deliver<decltype(t)>(p, row, rows, panel, sums); });
}

}  // namespace modulm
