// Products of integer activations with int8 and int4 weights.
//
// Within a run of k (a group, at most 256) products are summed exactly in int32, so that any order
// and any instruction gives the same sums. Runs are added in fp32 in the order of k, first those of
// a step of 256, then steps. A row therefore gets the same bits whichever kernel computes it.
#pragma once

#include "base/vec.h"
#include "linear/activations.h"
#include "linear/quad.h"

namespace modulm {

// Vectors successive vectors of scales from number `i` on.
template <int Vectors>
inline void load_scales(const void* p, int64_t i, int dtype, vf (&to)[Vectors]) {
  auto from = [&](auto* first) {
    for (int v = 0; v < Vectors; v++) to[v] = load(first + i + v * kLanes);
  };
  switch (dtype) {
    case kF32: return from(static_cast<const float*>(p));
    case kBF16: return from(static_cast<const bf16*>(p));
    case kFP16: return from(static_cast<const fp16*>(p));
  }
  for (int v = 0; v < Vectors; v++)
    to[v] = (vf)(widen_bytes(static_cast<const uint8_t*>(p) + i + v * kLanes) << 23);
}

inline int64_t scale_bytes(int dtype) { return dtype == kF32 ? 4 : dtype == kE8M0 ? 1 : 2; }

inline vf load_scales(const void* p, int64_t i, int dtype) {
  vf one[1];
  load_scales(p, i, dtype, one);
  return one[0];
}

// Rows that the kernel on vectors takes at once.
constexpr int kQuadRows = kRowTile < 6 ? kRowTile : 6;

#if defined(__AMX_INT8__)
constexpr int kIntegerRows = 2 * kRowTile;  // with tiles
#else
constexpr int kIntegerRows = kQuadRows;
#endif

}  // namespace modulm
