// One row of bf16 times panels side by side: memory is what this waits for, and streams that run
// through several places at once keep more of it under way.
//
// The sums are those of linear/tile.h, bit for bit. A tile product (TDPBF16PS) adds the even and
// the odd ones of 32 k separately from zero on, by fused multiply-adds that flush denormals, and
// their sum to the result; vectors do the same at twice the rate at which memory comes.
#pragma once

#include <utility>

#include "linear/tile.h"

#if defined(__AVX512F__)

namespace modulm {

// Bytes that are fetched ahead into the second and the first-level cache.
constexpr int kFarAhead = 3072, kNearAhead = 512;
constexpr int kPanelVectors = kPanel / kLanes;
constexpr int kLineBytes = kPanel * 4;  // of one pair
constexpr int kFewPairs = 16;           // multiplied between two looks at what follows

// Panels of 64 columns, read at the same time, and what is read after each of them; null: what
// lies behind it.
template <int Streams>
struct Panels {
  const uint32_t* at[Streams];
  const uint8_t* following[Streams];
};

#if defined(__AMX_BF16__)
class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
};
#else
struct FlushDenormals {};
#endif

// Sums of one vector of columns over kFewPairs pairs.
struct Dot {
#if defined(__AMX_BF16__)
  vf even{}, odd{};
  explicit Dot(const float*) {}
  void add(vu line, vu pair) {
    even += low_half(line) * low_half(pair);
    odd += high_half(line) * high_half(pair);
  }
  void finish(float* sum) const { store(sum, load(sum) + (even + odd)); }
#else
  vf all;
  explicit Dot(const float* sum) : all(load(sum)) {}
  void add(vu line, vu pair) {
#if defined(__AVX512BF16__)
    all = (vf)_mm512_dpbf16_ps((__m512)all, (__m512bh)line, (__m512bh)pair);
#else
    all += low_half(line) * low_half(pair);
    all += high_half(line) * high_half(pair);
#endif
  }
  void finish(float* sum) const { store(sum, all); }
#endif
};

template <int Streams>
struct FewStep {
  const bf16* x;
  const char* at[Streams];
  const char* far[Streams];
};

// The next kFewPairs pairs of all panels; in the last ones `far` turns to what follows. Not inlined,
// so that nothing is computed before denormals are flushed.
template <int Streams, size_t... i>
[[gnu::noinline]] void few_pairs(FewStep<Streams>& s, const Panels<Streams>* last, float* sums,
                      std::index_sequence<i...>) {
  constexpr int turn = kFewPairs - kFarAhead / kLineBytes;
  Dot dots[] = {Dot(sums + i * kLanes)...};
  for (int k = 0; k < kFewPairs; k++, s.x += 2) {
    if (k == turn && last)
      for (int t = 0; t < Streams; t++)
        if (last->following[t]) s.far[t] = reinterpret_cast<const char*>(last->following[t]);
    vu pair = vu{} + load_raw<uint32_t>(s.x);
    auto one = [&](Dot& dot, int stream, int byte) {
      _mm_prefetch(s.far[stream] + byte, _MM_HINT_T1);
      _mm_prefetch(s.at[stream] + byte + kNearAhead, _MM_HINT_T0);
      dot.add(load_raw<vu>(s.at[stream] + byte), pair);
    };
    (one(dots[i], int(i) / kPanelVectors, int(i) % kPanelVectors * 64), ...);
    for (int t = 0; t < Streams; t++) s.at[t] += kLineBytes, s.far[t] += kLineBytes;
  }
  (dots[i].finish(sums + i * kLanes), ...);
}

// sums[Streams][64] += x[2 pairs] * panels; pairs: a multiple of kFewPairs.
template <int Streams>
inline void one_row(const bf16* x, const Panels<Streams>& p, int64_t pairs, float* sums) {
  [[maybe_unused]] FlushDenormals flush;
  FewStep<Streams> step{x, {}, {}};
  for (int t = 0; t < Streams; t++) {
    step.at[t] = reinterpret_cast<const char*>(p.at[t]);
    step.far[t] = step.at[t] + kFarAhead;
  }
  for (int64_t k = 0; k < pairs; k += kFewPairs)
    few_pairs(step, k + kFewPairs < pairs ? nullptr : &p, sums,
              std::make_index_sequence<Streams * kPanelVectors>{});
}

}  // namespace modulm

#endif
