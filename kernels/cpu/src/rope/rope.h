// The rotation of one head, shared with the fused preparation of queries and keys.
#pragma once

#include "base/vec.h"

namespace modulm {

// Rotates the first `size` dimensions of a head in place. table: size / 2 cosines, then size / 2
// sines.
template <class T, class C>
inline void rotate_head(T* head, const C* table, int64_t size, bool neox) {
  int64_t half = size / 2;
  if (neox) {
    for_lanes(half, [&](int64_t i, int n) {
      vf cos = load_n(table + i, n), sin = load_n(table + half + i, n);
      vf a = load_n(head + i, n), b = load_n(head + half + i, n);
      store_n(head + i, a * cos - b * sin, n);
      store_n(head + half + i, b * cos + a * sin, n);
    });
    return;
  }
  for (int64_t i = 0; i < half; i++) {
    float cos = load_one(table + i), sin = load_one(table + half + i);
    float a = load_one(head + 2 * i), b = load_one(head + 2 * i + 1);
    store_one(head + 2 * i, a * cos - b * sin);
    store_one(head + 2 * i + 1, b * cos + a * sin);
  }
}

}  // namespace modulm
