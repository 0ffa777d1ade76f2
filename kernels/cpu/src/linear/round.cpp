// Rounding of a plain weight to codes of four bits with a scale and a zero point for each group.
//
// The twin is `modulm_quantized.rounding`, bit for bit: no product is fused with a sum, and squared
// errors are added by halves.
#include "base/pool.h"
#include "base/vec.h"

namespace modulm {
namespace {

constexpr int64_t kLongest = 256;  // group
constexpr float kTiny = 1e-12f;
// Fractions of a group's range to try, computed in double first, as in the twin.
constexpr double kShrinks[] = {1.0, 0.95, 0.9, 0.85, 0.8};

// A barrier: compilers cannot fuse the value with what follows.
inline vf settled(vf x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

// Nearest whole numbers of |x| < 2^22, ties to even.
inline vf whole(vf x) {
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23
  return settled(x + magic) - magic;
}
inline vf code(vf x) {
  vf y = whole(x);
  return y < 0.0f ? vf{} : y > 15.0f ? splat(15.0f) : y;
}

// x, finite, rounded to bf16.
inline float bf16_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
  std::memcpy(&x, &bits, sizeof bits);
  return x;
}

// The sum of `count` vectors (a power of 2), added by halves; `sum` continues in the same way.
inline float folded(vf* e, int64_t count) {
  for (int64_t half = count / 2; half; half /= 2)
    for (int64_t i = 0; i < half; i++) e[i] += e[half + i];
  return sum(e[0]);
}

struct Grid {
  float scale, zero;
};

// x: one group in fp32.
inline Grid grid_of(const float* x, int64_t group) {
  vf least{}, most{};
  for (int64_t i = 0; i < group; i += kLanes) {
    vf v = load(x + i);
    least = v < least ? v : least;
    most = v > most ? v : most;
  }
  float low = -largest(-least), span = largest(most) - low;
  Grid best{0.0f, 0.0f};
  float fewest = __builtin_inff();
  vf errors[kLongest / kLanes];
  for (double shrink : kShrinks) {
    float wanted = span * float(shrink / 15);
    float scale = bf16_of(wanted < kTiny ? kTiny : wanted);
    float zero = code(splat(low * float(-shrink) / scale))[0];
    vf inverse = splat(1.0f / scale), from = splat(zero);
    for (int64_t i = 0; i < group; i += kLanes) {
      vf exact = settled(load(x + i) * inverse) + from;
      vf off = code(exact) - exact;
      errors[i / kLanes] = settled(off * off);
    }
    float error = folded(errors, group / kLanes) * (scale * scale);
    if (error < fewest) fewest = error, best = {scale, zero};
  }
  return best;
}

template <class T>
void round_row(const T* x, int64_t k, int64_t group, uint8_t* codes, float* scales, float* zeros) {
  alignas(64) float wide[kLongest];
  for (int64_t g = 0; g < k / group; g++, x += group, codes += group) {
    for (int64_t i = 0; i < group; i += kLanes) store(wide + i, load(x + i));
    Grid grid = grid_of(wide, group);
    scales[g] = grid.scale;
    zeros[g] = grid.zero;
    for (int64_t i = 0; i < group; i += kLanes) {
      vf found = code(load(wide + i) / splat(grid.scale) + splat(grid.zero));
      store_raw(codes + i, narrow_bytes((vu)__builtin_convertvector(found, vi)));
    }
  }
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// x: [n, k] with row stride `stride` in elements -> codes [n, k], scales and zeros [n, k / group].
// group: 32, 64, 128 or 256.
MODULM_API void modulm_round_groups(const void* x, int64_t stride, int dtype, int64_t n, int64_t k,
                                    int64_t group, uint8_t* codes, float* scales, float* zeros) {
  const int64_t groups = k / group;
  with_float(dtype, [&](auto t) {
    auto from = static_cast<const decltype(t)*>(x);
    auto work = [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++)
        round_row(from + r * stride, k, group, codes + r * k, scales + r * groups,
                  zeros + r * groups);
    };
    const int64_t grain = 16;
    parallel(
        div_up(n, grain),
        [&](int64_t i, int) { work(i * grain, n < (i + 1) * grain ? n : (i + 1) * grain); }, true);
  });
}
