// What few rows fetch while they multiply: the keys and values that come next, in the order of memory.
#pragma once

#include <cstdint>

namespace modulm {

// Whether tiles do so, with each of their lines as much as they read. The processor's own prefetchers
// follow as soon as some lines of a run have been asked for, so runs are as long as the cache allows.
#if defined(__AVX512F__) && !defined(__AMX_BF16__)
constexpr bool kFetchedInTurn = true;
#else
constexpr bool kFetchedInTurn = false;
#endif

struct Run {
  const char *at, *end;
};

// A position in runs of which the last is followed by one whose end is null. There it stays at one
// place, so that a tile need not look.
struct Cursor {
  Run left{nullptr, nullptr};
  const Run* run = nullptr;

  explicit Cursor(const Run* first = nullptr) : run(first) {
    if (first) left = *first;
  }
  bool more() const { return left.end; }

  // Into the second-level cache.
  template <int Lines>
  void fetch() {
#pragma GCC unroll 8
    for (int i = 0; i < Lines; i++) __builtin_prefetch(left.at + i * 64, 0, 2);
    left.at += Lines * 64;
    if (__builtin_expect(left.at >= left.end, 0)) left = *(left.end ? ++run : run);
  }
};

// What a tile is given: the cursor moves on.
struct InTurn {
  Cursor& cursor;
};

}  // namespace modulm
