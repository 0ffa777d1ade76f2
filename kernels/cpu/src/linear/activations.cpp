#include "linear/activations.h"

#include "base/vec.h"

namespace modulm {
namespace {

constexpr int kQuantized = 5, kStartsOfZeros = 14;  // scratch slots

// Largest magnitudes of one and two digits: 127, and 127 * 256 + 127.
constexpr float kLargest[] = {127.0f, 32639.0f};

typedef int8_t vc __attribute__((vector_size(kLanes)));
typedef int16_t vs __attribute__((vector_size(kLanes * 2)));
typedef uint8_t v16 __attribute__((vector_size(16)));

// Nearest integers of |x| < 2^22, ties to even.
inline vi nearest(vf x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23
  return (vi)(x + magic) - 0x4b400000;
}

template <class T>
inline int32_t total(const T* codes, int64_t n) {
  int32_t sum = 0;
  for (int64_t i = 0; i < n; i++) sum += codes[i];
  return sum;
}

#if defined(__AVX512VNNI__)
// n: 16, 32 or a multiple of 64.
inline int32_t total(const int8_t* codes, int64_t n) {
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i sum{};
  for (; n >= 64; n -= 64, codes += 64)
    sum = _mm512_dpbusd_epi32(sum, ones, _mm512_loadu_si512(codes));
  if (n > 0)
    sum = _mm512_dpbusd_epi32(sum, ones, _mm512_maskz_loadu_epi32(__mmask16((1u << n / 4) - 1), codes));
  return _mm512_reduce_add_epi32(sum);
}
#endif

inline int32_t largest_of(vi x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  int32_t most = x[0];
  for (int i = 1; i < kLanes; i++) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

// The scale of x[0, n): NaN where x has an infinity or a NaN, so that results are NaN as well.
// Magnitudes are compared as bits, among which these are the largest.
template <class T>
float scale_of(const T* x, int64_t n, float largest_code) {
  constexpr int32_t infinity = 0x7f800000;
  vi most{};
  for_lanes(n, [&](int64_t i, int lanes) {
    const vi magnitude = (vi)load_n(x + i, lanes) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  });
  const int32_t bits = largest_of(most);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return bits < infinity ? value / largest_code : value - value;
}

// The order in which the nibbles of a packed lane become quads, within eight k.
void order_for_nibbles(int8_t* codes) {
  const v16 order = {0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15};
  for (int i = 0; i < kBlockK; i += 16)
    store_raw(codes + i, __builtin_shuffle(load_raw<v16>(codes + i), order));
}

// The totals of eight groups of 32, in pairs of 16 bits: 0 and 2, 1 and 3, 4 and 6, 5 and 7.
void put_pairs(const int8_t* codes, int16_t* to) {
  for (int i = 0; i < 8; i++)
    to[i / 4 * 4 + i % 2 * 2 + i / 2 % 2] = int16_t(total(codes + 32 * i, 32));
}

struct Target {
  const Activations& to;
  const Weight& w;

  // One step of one row from k on. n: number of existing k; the others are zero.
  template <class T>
  void step(const T* x, int64_t row, int64_t k, int64_t n) const {
    float scale = scale_of(x, n, kLargest[w.digits - 1]);
    float inverse = scale > 0 ? 1.0f / scale : 0.0f;
    if constexpr (kWideDigits) return wide_step(x, row, k, n, scale, inverse);
    alignas(64) int8_t high[kStep] = {}, low[kStep] = {};
    for_lanes(n, [&](int64_t i, int lanes) {
      vi code = nearest(load_n(x + i, lanes) * inverse);
      if (w.digits == 2) {
        vi above = (code + 128) >> 8;
        store_raw(low + i, __builtin_convertvector(code - (above << 8), vc));
        code = above;
      }
      store_raw(high + i, __builtin_convertvector(code, vc));
    });
    put(high, row * w.digits, k, w.digits == 2 && w.blocks() ? scale * 256.0f : scale);
    if (w.digits == 2) put(low, row * 2 + 1, k, scale);
  }

  // The same as numbers of 16 bits: pairs of k, see wide.h.
  template <class T>
  void wide_step(const T* x, int64_t row, int64_t k, int64_t n, float scale, float inverse) const {
    alignas(64) int16_t codes[kStep] = {};
    for_lanes(n, [&](int64_t i, int lanes) {
      store_raw(codes + i, __builtin_convertvector(nearest(load_n(x + i, lanes) * inverse), vs));
    });
    for (int d = 0; d < 2; d++) to.scales[(2 * row + d) * to.steps + k / kStep] = d ? 0.0f : scale;
    const int64_t end = k + kStep < w.runs_end() ? k + kStep : w.runs_end();
    int32_t* sums = to.sums + 2 * row * to.runs + k / w.run();
    if (w.minima()) put_digit_pairs(codes, row, k);
    else
      for (int64_t at = k; at < end; at += w.run(), sums++) {
        const int64_t stop = at + w.run() < end ? at + w.run() : end;
        sums[0] = -w.centre() * total(codes + (at - k), stop - at);
        sums[to.runs] = 0;
      }
    // Of eight the even and the odd ones of each quad: 0, 2, 1, 3, 4, 6, 5, 7; in a packed lane,
    // where quads are those of order_for_nibbles, 0, 1, 4, 5, 2, 3, 6, 7.
    const v16 plain = {0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15};
    const v16 nibbles = {0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15};
    const v16 order = w.format == kWeightInt4 ? nibbles : plain;
    int8_t* pairs = const_cast<int8_t*>(to.at(2 * row, 0)) + 2 * k;
    for (int64_t at = 0; at < end - k; at += 8)
      store_raw(pairs + 2 * at, __builtin_shuffle(load_raw<v16>(codes + at), order));
  }

  // The totals of the digits, whose minima are multiplied in 16 bits.
  void put_digit_pairs(const int16_t* codes, int64_t row, int64_t k) const {
    alignas(64) int8_t high[kStep], low[kStep];
    for (int64_t i = 0; i < kStep; i++) {
      const int above = (codes[i] + 128) >> 8;
      high[i] = int8_t(above);
      low[i] = int8_t(codes[i] - (above << 8));
    }
    int32_t* sums = to.sums + 2 * row * to.runs + k / w.run() / 2;
    put_pairs(high, reinterpret_cast<int16_t*>(sums));
    put_pairs(low, reinterpret_cast<int16_t*>(sums + to.runs));
  }

  void put(int8_t* codes, int64_t row, int64_t k, float scale) const {
    to.scales[row * to.steps + k / kStep] = scale;
    int64_t end = k + kStep < w.runs_end() ? k + kStep : w.runs_end();
    int32_t* sums = to.sums + row * to.runs + k / w.run() / (w.minima() ? 2 : 1);
    if (w.minima()) put_pairs(codes, reinterpret_cast<int16_t*>(sums));
    else
      for (int64_t at = k; at < end; at += w.run()) {
        int64_t stop = at + w.run() < end ? at + w.run() : end;
        *sums++ = -w.centre() * total(codes + (at - k), stop - at);
      }
    for (int64_t at = k; at < end; at += kBlockK, codes += kBlockK) {
      if (w.format == kWeightInt4) order_for_nibbles(codes);
      std::memcpy(const_cast<int8_t*>(to.at(row, at)), codes, kBlockK);
    }
  }
};

int64_t padded_rows(int64_t rows, const Weight& w) {
  return div_up(rows * digits_of(w), kRowTile) * kRowTile;
}

}  // namespace

int64_t activation_bytes(int64_t rows, const Weight& w) {
  int64_t all = padded_rows(rows, w);
  return all * (w.padded_k() + w.steps() * int64_t(sizeof(float)) +
                w.runs() * int64_t(sizeof(int32_t)));
}

Activations activations_in(void* memory, int64_t rows, const Weight& w) {
  int64_t all = padded_rows(rows, w);
  Activations to;
  to.rows = rows * digits_of(w);
  to.blocks = w.padded_k() / kBlockK;
  to.steps = w.steps();
  to.runs = w.runs();
  to.codes = static_cast<int8_t*>(memory);
  to.scales = reinterpret_cast<float*>(to.codes + all * w.padded_k());
  to.sums = reinterpret_cast<int32_t*>(to.scales + all * to.steps);
  return to;
}

void quantize_row(const Activations& to, const Weight& w, const void* x, int dtype, int64_t row) {
  const Target target{to, w};
  with_float(dtype, [&](auto t) {
    auto source = static_cast<const decltype(t)*>(x);
    for (int64_t k = 0; k < w.k; k += kStep)
      target.step(source + k, row, k, w.k - k < kStep ? w.k - k : kStep);
  });
}

void copy_row(const Activations& to, const Weight& w, const Activations& from, int64_t source,
              int64_t row) {
  const int64_t digits = digits_of(w);
  for (int64_t d = 0; d < digits; d++) {
    int64_t a = source * digits + d, b = row * digits + d;
    for (int64_t k = 0; k < w.padded_k(); k += kBlockK)
      std::memcpy(const_cast<int8_t*>(to.at(b, k)), from.at(a, k), kBlockK);
    std::memcpy(to.scales + b * to.steps, from.scales + a * from.steps, to.steps * sizeof(float));
    std::memcpy(to.sums + b * to.runs, from.sums + a * from.runs, to.runs * sizeof(int32_t));
  }
}

// A column whose zero is z + 8 has sums that begin at -(z + 8) times the sum of a run's codes, of which
// `sums` has -8 times.
void put_starts_of_zeros(const Activations& to, int64_t row) {
  alignas(64) static const int32_t zeros[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int32_t* starts = to.starts_of_zeros + row * to.runs * 16;
  for (int64_t i = 0; i < to.runs; i++, starts += 16) {
    const vi one = splat_int(to.sums[row * to.runs + i] / kCentres[kNoTable]);
    for (int z = 0; z < 16; z += kLanes) store_raw(starts + z, one * load_raw<vi>(zeros + z));
  }
}

Activations quantize(const void* x, int64_t ldx, int64_t rows, int dtype, const Weight& w) {
  Activations to = activations_in(scratch(kQuantized, activation_bytes(rows, w)), rows, w);
  if (kFindsStarts && rows > kRowTile && w.format == kWeightInt4 && w.digits == 1 && w.zeros &&
      w.whole_zeros && !w.table)
    to.starts_of_zeros = static_cast<int32_t*>(
        scratch(kStartsOfZeros, rows * to.runs * 16 * int64_t(sizeof(int32_t))));
  const int64_t size = dtype == kF32 ? 4 : 2;
  auto source = static_cast<const char*>(x);
  parallel_runs(rows, 4096 / w.padded_k(), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) {
      quantize_row(to, w, source + r * ldx * size, dtype, r);
      if (to.starts_of_zeros) put_starts_of_zeros(to, r);
    }
  });
  return to;
}

}  // namespace modulm
