// What the machine can do: read bandwidth and instruction rates, on all threads of the pool.
#include <chrono>

#include "base/pool.h"
#include "base/vec.h"

#if defined(__AMX_BF16__)
#include "linear/amx.h"
#endif

namespace modulm {
namespace {

double now() {
  using clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(clock::now().time_since_epoch()).count();
}

template <class T>
inline void keep(T& x) {  // the compiler must assume that x is read and written here
#if defined(__AVX512F__)
  __asm__ volatile("" : "+v"(x));
#else
  __asm__ volatile("" : "+x"(x));
#endif
}

// Runs a step of `chains` independent instructions many times on every thread: 1e9 per second.
template <class F>
double rate(int chains, F&& step) {
  constexpr int64_t kSteps = 2000000;
  int workers = threads();
  double start = now();
  parallel(workers, [&](int64_t, int) { step(kSteps); });
  return double(kSteps) * chains * workers / (now() - start) / 1e9;
}

template <class V, class F>
double chained(V first, F&& op) {
  return rate(12, [&](int64_t steps) {
    V x[12];
    for (V& each : x) each = first;
    for (int64_t i = 0; i < steps; i++)
#pragma GCC unroll 12
      for (int c = 0; c < 12; c++) {
        x[c] = op(x[c]);
        keep(x[c]);
      }
  });
}

#if defined(__AMX_BF16__)
void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
}
void bf16_step() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}
void int8_step() {
  _tile_dpbssd(0, 4, 6);
  _tile_dpbssd(1, 4, 7);
  _tile_dpbssd(2, 5, 6);
  _tile_dpbssd(3, 5, 7);
}
#endif

double read_all(const char* data, int64_t bytes) {
  constexpr int64_t kRun = 1 << 20;
  double start = now();
  parallel_runs(bytes, kRun, [&](int64_t begin, int64_t end) {
    vu total[4] = {};
    for (int64_t i = begin; i + 4 * int64_t(sizeof(vu)) <= end; i += 4 * sizeof(vu))
      for (int v = 0; v < 4; v++) {
        const char* at = data + i + v * sizeof(vu);
        __builtin_prefetch(at + 4096);
        total[v] += load_raw<vu>(at);
      }
    vu sum = total[0] + total[1] + total[2] + total[3];
    keep(sum);
  });
  return double(bytes) / (now() - start) / 1e9;
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// Bytes per second / 1e9 of one pass over `data`.
MODULM_API double modulm_probe_read(const void* data, int64_t bytes) {
  return read_all(static_cast<const char*>(data), bytes);
}

// Multiplications per second / 1e9 of: 0 fp32 fma, 1 vdpbf16ps, 2 vpdpbusd, 3 tdpbf16ps,
// 4 tdpbssd; lane selections per second / 1e9 of 5 vpermw. 0 where this level lacks it.
MODULM_API double modulm_probe_rate(int kind) {
  if (kind == 0) {
    vf one = splat(1.0f);
    return kLanes * chained(one, [one](vf x) { return x * one + one; });
  }
#if defined(__AVX512BW__)
  if (kind == 5) {
    __m512i index = _mm512_set1_epi16(1);
    return 32 * chained(index, [index](__m512i x) { return _mm512_permutexvar_epi16(x, index); });
  }
#endif
#if defined(__AVX512BF16__)
  if (kind == 1) {
    auto one = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    return 32 * chained(_mm512_setzero_ps(),
                        [one](__m512 x) { return _mm512_dpbf16_ps(x, one, one); });
  }
  if (kind == 2) {
    __m512i one = _mm512_set1_epi8(1);
    return 64 * chained(one, [one](__m512i x) { return _mm512_dpbusd_epi32(x, one, one); });
  }
#endif
#if defined(__AMX_BF16__)
  if (kind == 3 || kind == 4)
    return (kind == 3 ? 16 * 16 * 32 : 16 * 16 * 64) * rate(4, [&](int64_t steps) {
             configure(16, 16);
             zero_tiles();
             for (int64_t i = 0; i < steps; i++) kind == 3 ? bf16_step() : int8_step();
             _tile_release();
           });
#endif
  return 0.0;
}
