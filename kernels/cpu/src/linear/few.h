// One row of bf16 times several panels at once. Memory is the bottleneck, and several concurrent
// streams keep more loads in flight.
//
// The sums are those of linear/tile.h, bit for bit. A tile product (TDPBF16PS) adds the even and
// the odd ones of 32 k separately from zero on, by fused multiply-adds that flush denormals, and
// their sum to the result; vectors do the same at twice the rate of memory.
#pragma once

#include <utility>

#include "linear/tile.h"

namespace modulm {

// Distances in bytes of prefetches into the second-level and the first-level cache.
constexpr int64_t kFarAhead = 3072, kNearAhead = 512;

}  // namespace modulm

#if defined(__AVX512F__)

namespace modulm {

constexpr int kPanelVectors = kPanel / kLanes;
constexpr int kFewK = 32;  // k between two updates of the sums

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

// Two successive k of 16 columns, or of one number in all lanes, as this level multiplies them.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
struct Pair {
  vu both;
};
inline Pair pair_of(vu both) { return {both}; }
#else
struct Pair {
  vf low, high;
};
inline Pair pair_of(vu both) { return {low_half(both), high_half(both)}; }
#endif

// The sums of 16 columns over kFewK.
struct Dot {
#if defined(__AMX_BF16__)
  vf even{}, odd{};
  explicit Dot(const float*) {}
  void add(Pair a, Pair b) {
    even += a.low * b.low;
    odd += a.high * b.high;
  }
  vf sum() const { return even + odd; }
  void finish(float* to) const { store(to, load(to) + sum()); }
#else
  vf all;
  explicit Dot(const float* from) : all(load(from)) {}
  void add(Pair a, Pair b) {
#if defined(__AVX512BF16__)
    all = (vf)_mm512_dpbf16_ps((__m512)all, (__m512bh)a.both, (__m512bh)b.both);
#else
    all += a.low * b.low;
    all += a.high * b.high;
#endif
  }
  void finish(float* to) const { store(to, all); }
#endif
};

// bf16 pairs as stored in a panel. Other forms of codes have the same members: kBytes are kPairs
// pairs of 16 columns; `vector` counts these over all panels.
struct PlainCodes {
  static constexpr int kPairs = 1, kBytes = 64;
  void add(Dot& dot, int, const char* at, const Pair* x) const {
    dot.add(pair_of(load_raw<vu>(at)), x[0]);
  }
  void finish(const Dot& dot, int, float* sum) const { dot.finish(sum); }
};

// The read and prefetch addresses of several panels of 64 columns. After the end of a panel, the
// next data is prefetched if it is known.
template <int Streams>
struct Feed {
  const char *at[Streams], *far[Streams], *following[Streams];
  int64_t until;  // bytes until `far` reaches the ends of the panels

  Feed(const uint8_t* const (&panels)[Streams], const uint8_t* const (&after)[Streams],
       int64_t bytes) {
    for (int s = 0; s < Streams; s++) {
      at[s] = reinterpret_cast<const char*>(panels[s]);
      far[s] = at[s] + kFarAhead;
      following[s] = reinterpret_cast<const char*>(after[s]);
    }
    until = bytes - kFarAhead;
    if (until <= 0) turn();
  }
  void turn() {
    for (int s = 0; s < Streams; s++)
      if (following[s]) far[s] = following[s];
  }
  void advance(int64_t bytes) {
    for (int s = 0; s < Streams; s++) at[s] += bytes, far[s] += bytes;
    until -= bytes;
    if (until == 0) turn();
  }
};

// sums[Streams][64] += the next kFewK of x times the panels. Not inlined, so that nothing is
// computed before denormals are flushed.
template <class Codes, int Streams, size_t... i>
[[gnu::noinline]] void few_block(const Codes& codes, Feed<Streams>& given, const bf16* x,
                                 float* sums, std::index_sequence<i...>) {
  constexpr int lines = kFewK / 2 / Codes::kPairs;
  Feed<Streams> feed = given;
  Dot dots[] = {Dot(sums + i * kLanes)...};
  for (int line = 0; line < lines; line++, x += 2 * Codes::kPairs) {
    Pair pairs[Codes::kPairs];
    for (int p = 0; p < Codes::kPairs; p++)
      pairs[p] = pair_of(vu{} + load_raw<uint32_t>(x + 2 * p));
    auto one = [&](Dot& dot, int vector) {
      int stream = vector / kPanelVectors, byte = vector % kPanelVectors * Codes::kBytes;
      if (byte % 64 == 0) {
        _mm_prefetch(feed.far[stream] + byte, _MM_HINT_T1);
        _mm_prefetch(feed.at[stream] + byte + kNearAhead, _MM_HINT_T0);
      }
      codes.add(dot, vector, feed.at[stream] + byte, pairs);
    };
    (one(dots[i], int(i)), ...);
    feed.advance(kPanelVectors * Codes::kBytes);
  }
  (codes.finish(dots[i], int(i), sums + i * kLanes), ...);
  given = feed;
}

template <class Codes, int Streams>
inline void few_block(const Codes& codes, Feed<Streams>& feed, const bf16* x, float* sums) {
  few_block(codes, feed, x, sums, std::make_index_sequence<Streams * kPanelVectors>{});
}

// sums[Streams][64] += x[k] * panels of bf16, and then `after` is read; k: a multiple of kFewK.
template <int Streams>
inline void one_row(const bf16* x, int64_t k, const uint8_t* const (&panels)[Streams],
                    const uint8_t* const (&after)[Streams], float* sums) {
  [[maybe_unused]] FlushDenormals flush;
  Feed<Streams> feed(panels, after, k * kPanel * int64_t(sizeof(bf16)));
  for (int64_t i = 0; i < k; i += kFewK) few_block(PlainCodes{}, feed, x + i, sums);
}

}  // namespace modulm

#endif
