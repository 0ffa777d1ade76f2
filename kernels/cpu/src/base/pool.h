// The library's thread pool. The caller takes part; tasks are claimed one by one from a counter.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

namespace modulm {

using Task = void (*)(void* context, int64_t task, int worker);

// Runs task(context, i, worker) for every i in [0, tasks); returns when all are done. `worker` is
// in [0, threads()) and distinct among tasks that run at the same time. If another thread is
// inside, or if called from a task, everything runs on the calling thread. Sleeping threads are
// woken if the first task took long enough, or if `large` is set.
void run_tasks(int64_t tasks, Task task, void* context, bool large = false);

int threads();
void set_threads(int count);

// parallel(n, [&](int64_t i, int worker) { ... })
template <class F>
inline void parallel(int64_t tasks, F&& f, bool large = false) {
  using Body = std::remove_reference_t<F>;
  run_tasks(
      tasks,
      [](void* context, int64_t i, int worker) { (*static_cast<Body*>(context))(i, worker); },
      const_cast<void*>(static_cast<const void*>(&f)), large);
}

// parallel over [0, n) in runs of `grain` items: f(begin, end).
template <class F>
inline void parallel_runs(int64_t n, int64_t grain, F&& f) {
  if (grain < 1) grain = 1;
  parallel((n + grain - 1) / grain, [&](int64_t i, int) {
    int64_t begin = i * grain;
    f(begin, begin + grain < n ? begin + grain : n);
  });
}

// Tasks [begin, end) in one word: the owner takes from the front, other threads from the back.
class Span {
 public:
  void set(int64_t begin, int64_t end) { bounds_ = uint64_t(begin) << 32 | uint64_t(end); }
  // The next task, or -1.
  int64_t take(bool front) {
    uint64_t seen = bounds_.load(std::memory_order_relaxed);
    while (seen >> 32 < (seen & 0xffffffffu)) {
      uint64_t left = front ? seen + (uint64_t{1} << 32) : seen - 1;
      if (bounds_.compare_exchange_weak(seen, left, std::memory_order_relaxed))
        return int64_t(front ? seen >> 32 : left & 0xffffffffu);
    }
    return -1;
  }

 private:
  alignas(64) std::atomic<uint64_t> bounds_{0};
};

// Tasks [0, tasks), in one run for each of `count()` threads. A thread that has finished its run
// takes the last tasks of others.
class Spans {
 public:
  explicit Spans(int64_t tasks) : tasks_(tasks) {
    count_ = threads() < kMost ? threads() : kMost;
    if (count_ > tasks) count_ = tasks;
    for (int64_t i = 0; i < count_; i++) span_[i].set(begin(i), begin(i + 1));
  }
  int64_t count() const { return count_; }
  // The first task of a thread's run; the number of tasks for the thread past the last.
  int64_t begin(int64_t own) const { return count_ ? own * tasks_ / count_ : 0; }

  template <class F>
  void work(int64_t own, F&& f) {
    for (int64_t i = 0; i < count_; i++)
      for (int64_t task; (task = span_[(own + i) % count_].take(i == 0)) >= 0;) f(task);
  }

 private:
  static constexpr int kMost = 64;
  int64_t tasks_, count_;
  Span span_[kMost];
};

// Like parallel, but each thread gets consecutive tasks: for tasks that read memory sequentially,
// so that prefetches at the end of one task are the beginning of the next. f(task).
template <class F>
inline void parallel_near(int64_t tasks, F&& f) {
  Spans spans(tasks);
  parallel(spans.count(), [&](int64_t own, int) { spans.work(own, f); }, true);
}

// Scratch memory of one worker, kept between calls and grown when needed; 64-byte aligned. `slot`
// distinguishes buffers that are in use at the same time.
void* scratch(int slot, int64_t bytes);

}  // namespace modulm
