// Collectives of ranks on one machine, through shared memory.
//
// The region: a line of 64 bytes for each rank with the number of its last call, then two slots for
// each rank, used in turn. A rank writes its data into its slot, publishes the number of the call,
// and reads the slots of all ranks when all have published it. No rank publishes the next number
// before it has read, so slots of two calls ago are free.
//
// Sums are made in the order of the ranks, in fp32, and rounded once: they depend neither on the
// order of arrival nor on what else is summed.
#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstring>

#include "base/pool.h"
#include "base/replay.h"
#include "base/vec.h"

namespace modulm {
namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kSpins = 2000;   // polls before the processor is yielded
constexpr int64_t kYields = 20000; // yields, some milliseconds, before the rank sleeps
constexpr long kSleep = 50'000;    // nanoseconds
constexpr int64_t kBytesPerTask = 32768;

struct Region {
  char* start;
  int64_t rank, ranks, room;  // room: bytes of a slot

  std::atomic<int64_t>& said(int64_t r) const {
    return *reinterpret_cast<std::atomic<int64_t>*>(start + r * kLine);
  }
  char* slot(int64_t call, int64_t r) const {
    return start + ranks * kLine + ((call & 1) * ranks + r) * room;
  }
  int64_t next() const { return said(rank).load(std::memory_order_relaxed) + 1; }

  // Publish that the slot of this call is written, and wait for all ranks.
  void meet(int64_t call) const {
    said(rank).store(call, std::memory_order_release);
    for (int64_t r = 0; r < ranks; r++) {
      int64_t looks = 0;
      while (said(r).load(std::memory_order_acquire) < call)
        wait(++looks);
    }
  }

  // Other ranks arrive soon, unless something else runs on their processor: yield this one.
  static void wait(int64_t looks) {
    if (looks > kSpins + kYields) {
      timespec while_long{0, kSleep};
      nanosleep(&while_long, nullptr);
    } else if (looks > kSpins) {
      sched_yield();
    } else {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }
};

void copy(char* to, const char* from, int64_t bytes) {
  parallel_runs(bytes, kBytesPerTask, [&](int64_t begin, int64_t end) {
    std::memcpy(to + begin, from + begin, size_t(end - begin));
  });
}

template <class T>
void sum_slots(const Region& region, int64_t call, T* out, int64_t count) {
  parallel_runs(count, kBytesPerTask / int64_t(sizeof(T)), [&](int64_t begin, int64_t end) {
    for_lanes(end - begin, [&](int64_t i, int n) {
      vf total = load_n(reinterpret_cast<const T*>(region.slot(call, 0)) + begin + i, n);
      for (int64_t r = 1; r < region.ranks; r++)
        total += load_n(reinterpret_cast<const T*>(region.slot(call, r)) + begin + i, n);
      store_n(out + begin + i, total, n);
    });
  });
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// x, out: [count] of dtype; out may be x.
MODULM_API void modulm_rank_sum(void* start, int64_t rank, int64_t ranks, int64_t room,
                                const void* x, void* out, int64_t count, int dtype) {
  Region region{static_cast<char*>(start), rank, ranks, room};
  with_float(dtype, [&](auto t) {
    using T = decltype(t);
    int64_t most = room / int64_t(sizeof(T));
    for (int64_t at = 0; at < count; at += most) {
      int64_t part = count - at < most ? count - at : most, call = region.next();
      copy(region.slot(call, rank), reinterpret_cast<const char*>(static_cast<const T*>(x) + at),
           part * int64_t(sizeof(T)));
      region.meet(call);
      sum_slots(region, call, static_cast<T*>(out) + at, part);
    }
  });
}
MODULM_REPLAYABLE(rank_sum)

// x: [rows, bytes] of each rank; out: [rows, ranks, bytes].
MODULM_API void modulm_rank_gather(void* start, int64_t rank, int64_t ranks, int64_t room,
                                   const void* x, void* out, int64_t rows, int64_t bytes) {
  Region region{static_cast<char*>(start), rank, ranks, room};
  auto from = static_cast<const char*>(x);
  auto to = static_cast<char*>(out);
  int64_t width = bytes < room ? bytes : room, most = room / width;
  for (int64_t row = 0; row < rows; row += most)
    for (int64_t at = 0; at < bytes; at += width) {
      int64_t count = rows - row < most ? rows - row : most;
      int64_t part = bytes - at < width ? bytes - at : width, call = region.next();
      for (int64_t i = 0; i < count; i++)
        copy(region.slot(call, rank) + i * part, from + (row + i) * bytes + at, part);
      region.meet(call);
      for (int64_t r = 0; r < ranks; r++)
        for (int64_t i = 0; i < count; i++)
          copy(to + ((row + i) * ranks + r) * bytes + at, region.slot(call, r) + i * part, part);
    }
}
MODULM_REPLAYABLE(rank_gather)
