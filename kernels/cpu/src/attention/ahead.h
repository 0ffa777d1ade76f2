// What is fetched while other things are multiplied. Few rows fetch the keys and values that come next,
// in the order of memory; many rows fetch the next queries and the memory of results.
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

// Rows in memory that are fetched a few lines at a time: a processor drops prefetches that come at once.
class Gradual {
 public:
  Gradual() = default;
  // rows: of `bytes`, `stride` bytes apart. calls: of `fetch`, until all are fetched.
  Gradual(const void* from, int64_t stride, int64_t bytes, int64_t rows, int64_t calls)
      : row_(static_cast<const char*>(from)), stride_(stride), bytes_(bytes), rows_(rows),
        each_(((bytes + 63) / 64 * rows + calls - 1) / calls) {}

  void fetch() {
    for (int64_t i = 0; rows_ && i < each_; i++) {
      __builtin_prefetch(row_ + done_, 0, 2);
      done_ += 64;
      if (done_ >= bytes_) done_ = 0, rows_--, row_ += stride_;
    }
  }

 private:
  const char* row_ = nullptr;
  int64_t stride_ = 0, bytes_ = 0, rows_ = 0, each_ = 0, done_ = 0;
};

// What a tile is given: the cursor moves on.
struct InTurn {
  Cursor& cursor;
};

}  // namespace modulm
