// One row times panels of codes, which are multiplied as they come: nothing is decoded to memory.
//
// The sums are those of the path for more rows (moe/panel.h), bit for bit: codes are exact in
// floats, and so are multiples by powers of 2.
#pragma once

#include <cstring>

#include "linear/few.h"
#include "moe/decode.h"
#include "moe/scale.h"

#if defined(__AVX512F__)

namespace modulm {

// int8 in pairs.
struct ByteCodes {
  static constexpr int kPairs = 1, kBytes = 32;

  void add(Dot& dot, int, const char* at, const Pair* x) const {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
    auto source = reinterpret_cast<const __m128i*>(at);
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(source)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(source + 1)));
    dot.add({(vu)_mm512_cvtne2ps_pbh(high, low)}, x[0]);
#else
    vi both = (vi)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)at));
    dot.add({__builtin_convertvector(both << 24 >> 24, vf), __builtin_convertvector(both >> 8, vf)},
            x[0]);
#endif
  }
  void finish(const Dot& dot, int, float* sum) const { dot.finish(sum); }
};

// Values by nibble, as the level multiplies them.
class NibbleTable {
 public:
  explicit NibbleTable(const uint16_t (&values)[16]) {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
    table_ = (vu)nibble_table(values);
#else
    table_ = (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)values)) << 16;
#endif
  }
  // Pair j of the four in packed lanes.
  Pair operator()(vu lanes, int j) const {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
    return {(vu)_mm512_permutexvar_epi16((__m512i)(lanes >> (4 * j)), (__m512i)table_)};
#else
    return {value(lanes >> (4 * j)), value(lanes >> (4 * j + 16))};
#endif
  }

 private:
  vf value(vu nibble) const {
    return (vf)_mm512_permutexvar_epi32((__m512i)nibble, (__m512i)table_);
  }
  vu table_;
};

struct Int4Codes {
  static constexpr int kPairs = 4, kBytes = 64;
  NibbleTable table{kInt4Values};

  void add(Dot& dot, int, const char* at, const Pair* x) const {
    vu lanes = load_raw<vu>(at);
    for (int j = 0; j < 4; j++) dot.add(table(lanes, j), x[j]);
  }
  void finish(const Dot& dot, int, float* sum) const { dot.finish(sum); }
};

// One block of scales for each panel. Tiles sum a block from zero on, so its scale can wait.
template <int Streams>
struct MXCodes {
  static constexpr int kPairs = 4, kBytes = 64;
  const uint8_t* scales[Streams];
  NibbleTable table{kE2M1Values};

  vi exponents(int vector) const {
    const uint8_t* from = scales[vector / kPanelVectors] + vector % kPanelVectors * kLanes;
    vi biased = (vi)widen_bytes(from);
    return biased < 2 ? splat_int(2) : biased;
  }
  vf scale(int vector) const { return (vf)(exponents(vector) << 23); }

  void add(Dot& dot, int vector, const char* at, const Pair* x) const {
    vu lanes = load_raw<vu>(at);
    for (int j = 0; j < 4; j++) {
      Pair pair = table(lanes, j);
#if defined(__AMX_BF16__)
      (void)vector;
#elif defined(__AVX512BF16__)
      vi more = exponents(vector) - 127;
      vi both = (more << 7 & 0xffff) | more << 23;
      __m512i value = (__m512i)pair.both;
      __mmask32 nonzero = _mm512_test_epi16_mask(value, _mm512_set1_epi16(0x7fff));
      pair.both = (vu)_mm512_mask_add_epi16(value, nonzero, value, (__m512i)both);
#else
      pair.low *= scale(vector);
      pair.high *= scale(vector);
#endif
      dot.add(pair, x[j]);
    }
  }
  void finish(const Dot& dot, int vector, float* sum) const {
#if defined(__AMX_BF16__)
    store(sum, load(sum) + dot.sum() * scale(vector));
#else
    (void)vector;
    dot.finish(sum);
#endif
  }
};

// Side by side: panels of 64 columns with the same K, and what is read after them.
template <int Streams>
struct RowOfPanels {
  const PanelOf* panels[Streams];
  const uint8_t* after[Streams];
  const bf16* x;

  const Stack& stack() const { return panels[0]->s; }
  Feed<Streams> feed() const {
    const uint8_t* data[Streams];
    for (int s = 0; s < Streams; s++) data[s] = panels[s]->data;
    return Feed<Streams>(data, after, panels[0]->end() - panels[0]->data);
  }
};

// sums[Streams][64] += k in [first, end) times codes; codes(k) gives those of a block.
template <int Streams, class F>
inline void add_blocks(const RowOfPanels<Streams>& row, Feed<Streams>& feed, int64_t first,
                       int64_t end, float* sums, F&& codes) {
  [[maybe_unused]] FlushDenormals flush;
  for (int64_t k = first; k < end; k += kFewK) few_block(codes(k), feed, row.x + k, sums);
}

template <int Streams>
inline void int4_row(const RowOfPanels<Streams>& row, float* sums) {
  const Stack& stack = row.stack();
  Feed<Streams> feed = row.feed();
  alignas(64) float part[Streams * kPanel];
  const Int4Codes codes;
  for (int64_t k = 0, group = 0; k < stack.padded_k(); k += stack.group, group++) {
    std::memset(part, 0, sizeof part);
    int64_t end = k + stack.group;
    add_blocks(row, feed, k, end, part, [&](int64_t) -> const Int4Codes& { return codes; });
    float total = sum_of(row.x + k, stack.group);
    for (int s = 0; s < Streams; s++)
      add_scaled(*row.panels[s], group, total, part + s * kPanel, sums + s * kPanel);
  }
}

template <int Streams>
inline void mxfp4_row(const RowOfPanels<Streams>& row, float* sums) {
  Feed<Streams> feed = row.feed();
  add_blocks(row, feed, 0, row.stack().padded_k(), sums, [&](int64_t k) {
    MXCodes<Streams> codes{};
    for (int s = 0; s < Streams; s++)
      codes.scales[s] = row.panels[s]->block_scales() + k / kMXBlock * kPanel;
    return codes;
  });
}

template <class Codes, int Streams>
inline void plain_row(const RowOfPanels<Streams>& row, float* sums) {
  Feed<Streams> feed = row.feed();
  add_blocks(row, feed, 0, row.stack().padded_k(), sums, [](int64_t) { return Codes{}; });
}

// sums[Streams][64] += the row times the panels, scales applied.
template <int Streams>
inline void row_sums(const RowOfPanels<Streams>& row, float* sums) {
  switch (row.stack().format) {
    case kStackBF16: return plain_row<PlainCodes>(row, sums);
    case kStackInt4: return int4_row(row, sums);
    case kStackMXFP4: return mxfp4_row(row, sums);
  }
  plain_row<ByteCodes>(row, sums);
  for (int s = 0; s < Streams; s++) scale_channels(*row.panels[s], 1, sums + s * kPanel);
}

}  // namespace modulm

#endif
