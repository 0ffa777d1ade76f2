// Scales of quantized experts, applied to sums in fp32.
#pragma once

#include "base/vec.h"
#include "moe/stack.h"

namespace modulm {

// Fetches a panel's scales and zeros into the second-level cache: they are few and far from its
// codes, so that no prefetcher finds them.
inline void fetch_scales(const PanelOf& p) {
  auto fetch = [](const void* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64)
      __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
  };
  switch (p.s.format) {
    case kStackInt8: return fetch(p.channel_scales(), p.width * 4);
    case kStackMXFP4: return fetch(p.block_scales(), p.s.padded_k() / kMXBlock * p.width);
    case kStackInt4:
      fetch(p.group_scales(), p.s.groups() * p.width * 2);
      fetch(p.group_zeros(), p.s.groups() * p.width * 2);
  }
}

inline float sum_of(const bf16* x, int64_t n) {
  vf total{};
  for (int64_t i = 0; i < n; i += kLanes) total += load(x + i);
  return sum(total);
}

// sums[64] += scale * (part - zero * total), total being the sum of x over the group.
inline void add_scaled(const PanelOf& p, int64_t group, float total, const float* part,
                       float* sums) {
  const bf16* scales = p.group_scales() + group * p.width;
  const bf16* zeros = p.group_zeros() + group * p.width;
  for (int c = 0; c < p.width; c += kLanes) {
    vf dot = load(part + c) - load(zeros + c) * total;
    store(sums + c, load(sums + c) + dot * load(scales + c));
  }
}

inline void scale_channels(const PanelOf& p, int64_t rows, float* sums) {
  for (int64_t r = 0; r < rows; r++)
    for (int c = 0; c < p.width; c += kLanes)
      store(sums + r * kPanel + c, load(sums + r * kPanel + c) * load(p.channel_scales() + c));
}

}  // namespace modulm
