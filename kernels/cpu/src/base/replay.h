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
inline R apply(R (*f)(A...), const Slot* slots, std::index_sequence<I...>) {
  return f(from_slot<A>(slots[I])...);
}

// f with the arguments in slots.
template <class R, class... A>
inline R apply(R (*f)(A...), const Slot* slots) {
  return apply(f, slots, std::index_sequence_for<A...>{});
}

template <class R, class... A>
inline int64_t call_with(R (*f)(A...), const Slot* slots) {
  if constexpr (std::is_void_v<R>) {
    apply(f, slots);
    return 0;
  } else {
    return int64_t(apply(f, slots));
  }
}

}  // namespace modulm

#define MODULM_REPLAYABLE(op)                                     \
  MODULM_API int64_t modulm_replay_##op(const modulm::Slot* s) {  \
    return modulm::call_with(&modulm_##op, s);                    \
  }
