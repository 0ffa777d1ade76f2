// Measurements of the machine: read bandwidth and instruction rates, on all threads of the pool.
#include <chrono>
#include <utility>

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

// Makes the compiler assume that the value is read and written, so that it is neither folded nor
// moved out of a loop.
template <class T>
inline T kept(T x) {
#if defined(__AVX512F__)
  __asm__ volatile("" : "+v"(x));
#else
  __asm__ volatile("" : "+x"(x));
#endif
  return x;
}

// Runs step(count), `chains` independent instructions `count` times, on every thread: 1e9 per
// second. Short runs before wake the helpers and let the cores reach their clock.
template <class F>
double rate(int64_t count, int chains, F&& step) {
  int workers = threads();
  auto once = [&](int64_t steps) {
    double start = now();
    parallel(workers, [&](int64_t, int) { step(steps); }, true);
    return now() - start;
  };
  for (int64_t short_run = count / 64; short_run < count; short_run *= 4) once(short_run);
  return double(count) * chains * workers / once(count) / 1e9;
}

constexpr int kChains = 12;  // covers 4 to 6 cycles of latency at two instructions per cycle

// Each chain is a separate variable, not an array element, so that all stay in registers.
template <class V, class F, size_t... chain>
void repeat(int64_t steps, V first, F&& op, std::index_sequence<chain...>) {
  V x[] = {(void(chain), first)...};
  for (int64_t i = 0; i < steps; i++) ((x[chain] = kept(op(x[chain]))), ...);
}

template <class V, class F>
double chained(V first, F&& op) {
  return rate(4000000, kChains, [&](int64_t steps) {
    repeat(steps, first, op, std::make_index_sequence<kChains>{});
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

// Reads two streams at a time with prefetches into both caches, as weights are read (linear/few.h):
// faster than one stream.
double read_all(const char* data, int64_t bytes) {
  constexpr int64_t kHalf = 128 << 10, kLine = sizeof(vu), kLines = 4;
  double start = now();
  parallel_near(bytes / (2 * kHalf), [&](int64_t task) {
    const char* from = data + task * 2 * kHalf;
    vu total[kLines] = {};
    for (int64_t i = 0; i < kHalf; i += kLines * kLine)
      for (const char* at : {from + i, from + kHalf + i})
        for (int v = 0; v < kLines; v++) {
          __builtin_prefetch(at + v * kLine + 3072, 0, 2);
          __builtin_prefetch(at + v * kLine + 512);
          total[v] += load_raw<vu>(at + v * kLine);
        }
    vu sum = total[0] + total[1] + total[2] + total[3];
    kept(sum);
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
    return (kind == 3 ? 16 * 16 * 32 : 16 * 16 * 64) * rate(400000, 4, [&](int64_t steps) {
             configure(16, 16);
             zero_tiles();
             for (int64_t i = 0; i < steps; i++) kind == 3 ? bf16_step() : int8_step();
             _tile_release();
           });
#endif
  return 0.0;
}
