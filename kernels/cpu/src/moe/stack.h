// The packed weights of a layer's experts: [experts][parts] matrices [N, K] one after the other, each
// laid out as linear/weight.h says, with scales and zero points one matrix after the other too.
#pragma once

#include "linear/integer.h"
#include "linear/weight.h"

namespace modulm {

struct Stack {
  Weight first;  // the matrix of the first expert's first part
  int64_t experts, parts;

  bool wide() const { return first.format == kWeightFP32 || first.format == kWeightFP16; }
  // Padded length of a row of activations, with zeros at the end.
  int64_t padded_k() const { return first.padded_k(); }
  int64_t panels() const { return first.panels(); }
  // Bytes of an activation that these weights are multiplied by, unless they are integers.
  int64_t input_size() const { return wide() ? sizeof(float) : sizeof(bf16); }

  Weight matrix(int64_t expert, int64_t part) const {
    int64_t i = expert * parts + part, columns = first.padded_n();
    Weight w = first;
    w.data += i * w.bytes(w.padded_k(), kPanel) * columns / kPanel;
    int64_t scales = i * columns * w.groups() * (w.grouped() ? scale_bytes(w.scale_dtype) : 4);
    if (w.scales) w.scales = static_cast<const char*>(w.scales) + scales;
    if (w.zeros) w.zeros = static_cast<const char*>(w.zeros) + scales;
    return w;
  }
};

// One panel of one matrix.
struct PanelOf {
  Weight w;
  int64_t panel;

  PanelOf(const Stack& s, int64_t expert, int64_t part, int64_t panel)
      : w(s.matrix(expert, part)), panel(panel) {}
  const uint8_t* data() const { return w.panel(panel); }
  int width() const { return w.width(panel); }
};

// Prefetches the scales and zeros of a panel into the second-level cache: they are few and far from
// its codes, so the hardware prefetcher misses them.
inline void fetch_scales(const PanelOf& p) {
  if (!p.w.scales) return;
  int64_t bytes = p.w.grouped() ? scale_bytes(p.w.scale_dtype) : 4;
  int64_t first = p.w.scale_index(p.panel, 0) * bytes, size = p.w.groups() * p.width() * bytes;
  for (const void* from : {p.w.scales, p.w.zeros})
    for (int64_t i = 0; from && i < size; i += 64)
      __builtin_prefetch(static_cast<const char*>(from) + first + i, 0, 2);
}

}  // namespace modulm
