// Element types, their codes in the C ABI, and dispatch from a code to a type.
#pragma once

#include <cstddef>
#include <cstdint>

#define MODULM_API extern "C" __attribute__((visibility("default")))

namespace modulm {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
struct fp8 {  // e4m3fn: no infinities, 0x7f and 0xff are NaN
  uint8_t bits;
};

// Codes that the Python side passes for torch dtypes.
enum Dtype : int { kF32 = 0, kBF16 = 1, kFP16 = 2, kFP8 = 3, kE8M0 = 4 };

// Calls f with a value of the element type `dtype`. Activations are never fp8; powers of two (e8m0,
// an exponent plus 127) are scales only.
template <class F>
inline void with_float(int dtype, F&& f) {
  switch (dtype) {
    case kF32: f(float{}); break;
    case kBF16: f(bf16{}); break;
    default: f(fp16{}); break;
  }
}

inline int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace modulm
