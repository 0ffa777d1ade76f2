// The rows of a step and where their states lie; see StatePlan in the core's contracts.
#pragma once

#include <cstdint>
#include <cstring>

namespace modulm {

// [tokens, ...] with a stride.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
  const T* at(int64_t token) const { return data + token * stride; }
};

struct Kept {
  int64_t row, tokens, slot;
};

// starts: [rows + 1], first tokens; a fresh row begins with zeros.
struct StateRows {
  const int32_t* starts;
  const int64_t* sources;
  const int64_t* slots;
  const uint8_t* fresh;
  const Kept* kept;
  int64_t kept_count;

  // Calls f(begin, end, slot) for each run of a row's tokens after which the state is saved in
  // `slot`: every saved state, then the last one. Tokens count from the row's first.
  template <class F>
  void stretches(int64_t row, F&& f) const {
    int64_t at = 0;
    for (int64_t i = 0; i < kept_count; i++) {
      if (kept[i].row != row) continue;
      f(at, kept[i].tokens, kept[i].slot);
      at = kept[i].tokens;
    }
    f(at, int64_t(starts[row + 1] - starts[row]), slots[row]);
  }
};

}  // namespace modulm
