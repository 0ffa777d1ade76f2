#include "base/replay.h"

#include "base/pool.h"

using namespace modulm;

const Joined* Joined::all_ = nullptr;

namespace {

// An input to copy: `rows` of `bytes` each, to rows of which the first `clear` bytes are zeroed.
struct Input {
  uint8_t* to;
  int64_t to_stride;
  const uint8_t* from;
  int64_t from_stride, rows, bytes, clear;
};

}  // namespace

// program: for each call the address of a modulm_replay_ function, the number of its slots, the
// slots. Calls that are `Joined` may be done as one. Returns 0, or the result of the first call that failed; later calls are skipped.
MODULM_API int64_t modulm_replay(const Slot* program, int64_t size, const Input* inputs,
                                 int64_t count) {
  for (const Input* input = inputs; input < inputs + count; input++)
    for (int64_t row = 0; row < input->rows; row++) {
      uint8_t* to = input->to + row * input->to_stride;
      std::memcpy(to, input->from + row * input->from_stride, input->bytes);
      if (input->clear > input->bytes) std::memset(to + input->bytes, 0, input->clear - input->bytes);
    }
  for (const Slot *at = program, *end = program + size; at < end; at += 2 + at[1]) {
    const auto call = from_slot<Replayed>(at[0]);
    const Slot* next = at + 2 + at[1];
    if (next < end && Joined::run(call, at + 2, from_slot<Replayed>(next[0]), next + 2)) {
      at = next;
      continue;
    }
    if (int64_t failed = call(at + 2)) return failed;
  }
  return 0;
}
