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
using Replayed = int64_t (*)(const Slot*);  // a modulm_replay_ function

// Two functions whose recorded calls may be done as one where they follow each other. Created once, as
// a static object beside the second function.
class Joined {
 public:
  // run: does both calls, from their slots, and returns true, or does nothing.
  using Run = bool (*)(const Slot* first, const Slot* second);

  Joined(Replayed first, Replayed second, Run run)
      : first_(first), second_(second), run_(run), next_(all_) {
    all_ = this;
  }

  // Does the call of `first` at `slots` and the one of `second` after it, if they can be joined.
  static bool run(Replayed first, const Slot* slots, Replayed second, const Slot* following) {
    for (const Joined* one = all_; one; one = one->next_)
      if (one->first_ == first && one->second_ == second) return one->run_(slots, following);
    return false;
  }

 private:
  const Replayed first_, second_;
  const Run run_;
  const Joined* const next_;
  static const Joined* all_;
};

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
