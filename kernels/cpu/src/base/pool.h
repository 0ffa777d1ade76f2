// The library's own threads. The caller takes part; tasks are claimed one by one from a counter.
#pragma once

#include <cstdint>

namespace modulm {

using Task = void (*)(void* context, int64_t task, int worker);

// Runs task(context, i, worker) for every i in [0, tasks); returns when all are done. `worker` is
// in [0, threads()) and distinct among tasks that run at the same time. Called while another
// thread is inside, or from a task, it runs everything on the calling thread.
void run_tasks(int64_t tasks, Task task, void* context);

int threads();
void set_threads(int count);

// parallel(n, [&](int64_t i, int worker) { ... })
template <class F>
inline void parallel(int64_t tasks, F&& f) {
  run_tasks(
      tasks, [](void* context, int64_t i, int worker) { (*static_cast<F*>(context))(i, worker); },
      const_cast<void*>(static_cast<const void*>(&f)));
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

// Scratch memory of one worker, kept between calls and grown when needed; 64-byte aligned.
// `slot` tells apart buffers that are in use at the same time.
void* scratch(int slot, int64_t bytes);

}  // namespace modulm
