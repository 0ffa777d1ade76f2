// Recorded calls of the library's functions, to be replayed without their caller.
//
// A recorded call is a row of 64-bit slots, one for each argument. MODULM_REPLAYABLE(op), after
// the definition of modulm_op, makes the function that reads such a row and calls modulm_op.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "base/types.h"

namespace modulm {

using Slot = uint64_t;

template <class T>
inline T from_slot(Slot slot) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(static_cast<uintptr_t>(slot));
  } else if constexpr (std::is_floating_point_v<T>) {
    double wide;
    std::memcpy(&wide, &slot, sizeof wide);
    return T(wide);
  } else {
    return T(static_cast<int64_t>(slot));
  }
}

template <class R, class... A, size_t... I>
inline int64_t call_with(R (*f)(A...), const Slot* slots, std::index_sequence<I...>) {
  if constexpr (std::is_void_v<R>) {
    f(from_slot<A>(slots[I])...);
    return 0;
  } else {
    return int64_t(f(from_slot<A>(slots[I])...));
  }
}

template <class R, class... A>
inline int64_t call_with(R (*f)(A...), const Slot* slots) {
  return call_with(f, slots, std::index_sequence_for<A...>{});
}

}  // namespace modulm

#define MODULM_REPLAYABLE(op)                                     \
  MODULM_API int64_t modulm_replay_##op(const modulm::Slot* s) {  \
    return modulm::call_with(&modulm_##op, s);                    \
  }
