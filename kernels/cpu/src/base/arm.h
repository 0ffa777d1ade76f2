// Instructions of Arm processors on the vectors of vec.h: 128 bits of NEON, or SVE of 256 bits.
#pragma once

#include "base/types.h"

#if defined(__aarch64__)

#include <arm_neon.h>
#include <cstring>

#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 256
#define MODULM_SVE256 1
#include <arm_sve.h>
#endif

// Products of four bytes, or of two bf16, added to a lane of 32 bits.
#if defined(__ARM_FEATURE_DOTPROD)
#define MODULM_QUAD_DOT 1
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define MODULM_BF16_DOT 1
#endif

namespace modulm {

// The same bits as another type of vector.
template <class To, class From>
inline To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "vectors of one size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

#if defined(MODULM_SVE256)
typedef svfloat32_t lanes_f32 __attribute__((arm_sve_vector_bits(256)));
typedef svint32_t lanes_s32 __attribute__((arm_sve_vector_bits(256)));
typedef svint8_t lanes_s8 __attribute__((arm_sve_vector_bits(256)));
typedef svuint8_t lanes_u8 __attribute__((arm_sve_vector_bits(256)));
typedef svbfloat16_t lanes_bf16 __attribute__((arm_sve_vector_bits(256)));

inline lanes_f32 fused_lanes(lanes_f32 a, lanes_f32 b, lanes_f32 c) {
  return svmla_f32_x(svptrue_b32(), c, a, b);
}
inline lanes_s32 dot_lanes(lanes_s32 sum, lanes_u8 a, lanes_s8 b) { return svusdot_s32(sum, a, b); }
inline lanes_f32 dot_lanes(lanes_f32 sum, lanes_bf16 a, lanes_bf16 b) {
  return svbfdot_f32(sum, a, b);
}
#else
typedef float32x4_t lanes_f32;
typedef int32x4_t lanes_s32;
typedef int8x16_t lanes_s8;
typedef uint8x16_t lanes_u8;

inline lanes_f32 fused_lanes(lanes_f32 a, lanes_f32 b, lanes_f32 c) { return vfmaq_f32(c, a, b); }

#if defined(__ARM_FEATURE_MATMUL_INT8)
inline lanes_s32 dot_lanes(lanes_s32 sum, lanes_u8 a, lanes_s8 b) { return vusdotq_s32(sum, a, b); }
#elif defined(__ARM_FEATURE_DOTPROD)
// a b = (a - 128) b + 128 b, and 128 is no signed byte.
inline lanes_s32 dot_lanes(lanes_s32 sum, lanes_u8 a, lanes_s8 b) {
  const int32x4_t less = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(-128), b);
  const int8x16_t centred = vreinterpretq_s8_u8(veorq_u8(a, vdupq_n_u8(128)));
  return vdotq_s32(vsubq_s32(sum, less), centred, b);
}
#endif
#if defined(MODULM_BF16_DOT)
typedef bfloat16x8_t lanes_bf16;
inline lanes_f32 dot_lanes(lanes_f32 sum, lanes_bf16 a, lanes_bf16 b) {
  return vbfdotq_f32(sum, a, b);
}
#endif
#endif

}  // namespace modulm

#endif
