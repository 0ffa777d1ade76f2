#include "base/replay.h"

#include "base/pool.h"

using namespace modulm;

// program: for each call the address of a modulm_replay_ function, the number of its slots, the
// slots. Returns 0, or the result of the first call that failed; later calls are skipped.
MODULM_API int64_t modulm_replay(const Slot* program, int64_t size) {
  for (const Slot *at = program, *end = program + size; at < end; at += 2 + at[1]) {
    auto call = from_slot<int64_t (*)(const Slot*)>(at[0]);
    if (int64_t failed = call(at + 2)) return failed;
  }
  return 0;
}
