#include "base/pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "base/types.h"

namespace modulm {
namespace {

// How long a waiting thread polls before it blocks: longer than the gap between two kernels of a
// decode step, but too short to show as a busy core.
constexpr std::chrono::microseconds kSpin{40};
// Minimum remaining work for which sleeping threads are woken.
constexpr std::chrono::microseconds kWorthWaking{20};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}
void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

// A word that threads wait on; `sleepers` saves the system call when no thread is blocked.
struct Signal {
  alignas(64) std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  // Returns whether a thread sleeps; polling threads see the change at once.
  bool show() {
    value.fetch_add(1, std::memory_order_seq_cst);
    return sleepers.load(std::memory_order_seq_cst);
  }
  void raise() {
    if (show()) futex_wake(value);
  }
  void wait_beyond(uint32_t seen) {
    auto deadline = std::chrono::steady_clock::now() + kSpin;
    do {
      for (int i = 0; i < 32; i++) {
        if (value.load(std::memory_order_acquire) != seen) return;
        relax();
      }
    } while (std::chrono::steady_clock::now() < deadline);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (value.load(std::memory_order_seq_cst) == seen) futex_wait(value, seen);
    sleepers.fetch_sub(1, std::memory_order_relaxed);
  }
};

// One call of run_tasks. A helper that wakes late may still hold the previous job, so a job is
// claimed through a counter whose upper half is the job's number: a stale claim fails.
struct Pool {
  Signal start;
  Signal done;
  alignas(64) std::atomic<uint64_t> next{0};  // job number << 40 | next task
  alignas(64) std::atomic<int64_t> finished{0};
  std::atomic<Task> task{nullptr};
  std::atomic<void*> context{nullptr};
  std::atomic<int64_t> tasks{0};
  std::atomic<bool> stop{false};
  uint64_t job = 0;
  std::vector<std::thread> helpers;

  explicit Pool(int helper_count) {
    for (int i = 0; i < helper_count; i++) helpers.emplace_back([this, i] { serve(i + 1); });
  }
  ~Pool() {
    stop = true;
    start.raise();
    for (auto& helper : helpers) helper.join();
  }

  static constexpr int kJobShift = 40;
  static constexpr uint64_t kTaskMask = (uint64_t{1} << kJobShift) - 1;

  void work(uint64_t number, int64_t total, Task f, void* with, int worker) {
    int64_t mine = 0;
    uint64_t claim = next.load(std::memory_order_acquire);
    while (claim >> kJobShift == number && int64_t(claim & kTaskMask) < total) {
      if (!next.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel)) continue;
      f(with, int64_t(claim & kTaskMask), worker);
      mine++;
      claim = next.load(std::memory_order_acquire);
    }
    if (mine && finished.fetch_add(mine, std::memory_order_acq_rel) + mine == total) done.raise();
  }

  void serve(int worker) {
    uint32_t seen = 0;
    while (true) {
      start.wait_beyond(seen);
      seen = start.value.load(std::memory_order_acquire);
      if (stop) return;
      // Reads the job number first: if a new job is set up meanwhile, no claim can succeed.
      uint64_t number = next.load(std::memory_order_acquire) >> kJobShift;
      int64_t total = tasks.load(std::memory_order_acquire);
      Task f = task.load(std::memory_order_acquire);
      void* with = context.load(std::memory_order_acquire);
      if (next.load(std::memory_order_acquire) >> kJobShift == number)
        work(number, total, f, with, worker);
    }
  }

  // Runs one task to find out whether the others are worth a system call and the wake-up time of a
  // thread. On a busy machine, a woken thread may lose a whole time slice.
  bool worth_waking(int64_t total, Task f, void* with) {
    auto began = std::chrono::steady_clock::now();
    uint64_t claim = job << kJobShift;
    if (!next.compare_exchange_strong(claim, claim + 1, std::memory_order_acq_rel)) return true;
    f(with, 0, 0);
    finished.fetch_add(1, std::memory_order_acq_rel);
    return (std::chrono::steady_clock::now() - began) * (total - 1) > kWorthWaking;
  }

  void run(int64_t total, Task f, void* with, bool large) {
    job = (job + 1) & ((uint64_t{1} << 24) - 1);
    // A job number without free tasks keeps late helpers out while the fields change.
    next.store(job << kJobShift | kTaskMask, std::memory_order_seq_cst);
    task.store(f, std::memory_order_release);
    context.store(with, std::memory_order_release);
    tasks.store(total, std::memory_order_release);
    finished.store(0, std::memory_order_release);
    job = (job + 1) & ((uint64_t{1} << 24) - 1);
    next.store(job << kJobShift, std::memory_order_seq_cst);
    if (start.show() && (large || worth_waking(total, f, with))) futex_wake(start.value);
    work(job, total, f, with, 0);
    while (true) {
      uint32_t seen = done.value.load(std::memory_order_acquire);
      if (finished.load(std::memory_order_acquire) == total) return;
      done.wait_beyond(seen);
    }
  }
};

std::mutex guard;
Pool* pool = nullptr;
int wanted = 0;
thread_local bool inside = false;

int default_threads() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return int(std::thread::hardware_concurrency());
}

// After fork, only the calling thread exists: drop the pool; it is created again when needed. The
// old object is leaked on purpose, as its threads cannot be joined.
void forget_in_child() {
  pool = nullptr;
  new (&guard) std::mutex;
  inside = false;
}

}  // namespace

int threads() {
  if (wanted == 0) wanted = default_threads() > 0 ? default_threads() : 1;
  return wanted;
}

void set_threads(int count) {
  std::lock_guard<std::mutex> lock(guard);
  delete pool;
  pool = nullptr;
  wanted = count > 0 ? count : 0;
}

void run_tasks(int64_t tasks, Task task, void* context, bool large) {
  if (tasks <= 0) return;
  if (tasks > 1 && !inside && threads() > 1 && guard.try_lock()) {
    if (!pool) {
      static const int once = pthread_atfork(nullptr, nullptr, forget_in_child);
      (void)once;
      pool = new Pool(threads() - 1);
    }
    inside = true;
    pool->run(tasks, task, context, large);
    inside = false;
    guard.unlock();
    return;
  }
  for (int64_t i = 0; i < tasks; i++) task(context, i, 0);
}

namespace {
constexpr int64_t kHugePage = 2 << 20;

struct Buffer {
  void* data = nullptr;
  int64_t bytes = 0;
  ~Buffer() { std::free(data); }
};
}  // namespace

void* scratch(int slot, int64_t bytes) {
  thread_local Buffer buffers[16];
  Buffer& buffer = buffers[slot];
  if (buffer.bytes < bytes) {
    std::free(buffer.data);
    const int64_t page = bytes < kHugePage ? 4096 : kHugePage;
    buffer.bytes = div_up(bytes, page) * page;
    buffer.data = std::aligned_alloc(page, buffer.bytes);
    if (!buffer.data) std::abort();
    if (page == kHugePage) madvise(buffer.data, buffer.bytes, MADV_HUGEPAGE);
  }
  return buffer.data;
}

}  // namespace modulm

MODULM_API int modulm_threads() { return modulm::threads(); }
MODULM_API void modulm_set_threads(int count) { modulm::set_threads(count); }
