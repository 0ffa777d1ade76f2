// Low-rank additions to the output of a layer, different for each group of tokens.
//
// Two passes: shrink makes the narrow rows h = down x in fp32, expand adds up^T h to the output,
// which is rounded once. The result of a token does not depend on other tokens: every sum has a
// fixed order, whatever the number of tokens and the division of work.
#include <type_traits>
#include <vector>

#include "base/pool.h"
#include "base/replay.h"
#include "base/vec.h"

namespace modulm {
namespace {

constexpr int kIds = -1;        // in place of a dtype of x: ids of the rows of a table
constexpr int64_t kFields = 5;  // of an address: rank, down, up, first output, outputs
constexpr int64_t kTokens = 32; // of a task
constexpr int64_t kRanks = 4;   // of a task that shrinks
constexpr int64_t kColumns = 16 * kLanes;  // of a task that expands
constexpr int64_t kAhead = 8 * kLanes;     // columns between those added and those fetched
// Tokens whose sums of two vectors stay in registers.
#if defined(__AVX512F__)
constexpr int64_t kSide = 8;
#else
constexpr int64_t kSide = 4;
#endif
constexpr int kScratch = 0;

// One piece of one adapter, and the tokens of the step that use it.
struct Job {
  int64_t rank, start, size;
  const void* down;
  const void* up;
  const int32_t* tokens;
  int64_t count;
  float* narrow;        // [count, rank]
  int64_t shrink, expand;  // its first tasks

  int64_t token_parts() const { return div_up(count, kTokens); }
  int64_t rank_parts() const { return div_up(rank, kRanks); }
  int64_t column_parts() const { return div_up(size, kColumns); }
};

inline vf fma_step(vf sum, vf a, vf b) { return a * b + sum; }
// `x - 0` keeps the sign of zeros, so that compilers leave a broadcast; `0 + x` is an addition.
inline vf spread(float x) { return x - vf{}; }

// sums[t][r] = <x[t], down[r]>, R rows and T tokens at a time. The R rows after them are fetched:
// they are mostly the thread's next task, and too short for the hardware to see them coming.
template <int T, int R, class X, class W>
inline void dots(const X* const* x, const W* down, int64_t inputs, float* const* out) {
  vf sums[T][R] = {};
  int64_t k = 0;
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<X, bf16> && std::is_same_v<W, bf16>) {
    for (; k + 2 * kLanes <= inputs; k += 2 * kLanes) {
      __m512bh w[R];
      for (int r = 0; r < R; r++) {
        w[r] = (__m512bh)_mm512_loadu_si512(down + r * inputs + k);
        __builtin_prefetch(down + (r + R) * inputs + k);
      }
      for (int t = 0; t < T; t++) {
        auto v = (__m512bh)_mm512_loadu_si512(x[t] + k);
        for (int r = 0; r < R; r++) sums[t][r] = (vf)_mm512_dpbf16_ps((__m512)sums[t][r], v, w[r]);
      }
    }
  }
#endif
  auto step = [&](auto&& part) {
    vf w[R];
    for (int r = 0; r < R; r++) w[r] = part(down + r * inputs + k);
    for (int t = 0; t < T; t++) {
      vf v = part(x[t] + k);
      for (int r = 0; r < R; r++) sums[t][r] = fma_step(sums[t][r], v, w[r]);
    }
  };
  for (; k + kLanes <= inputs; k += kLanes) step([](auto* p) { return load(p); });
  if (k < inputs) step([&](auto* p) { return load_some(p, int(inputs - k)); });
  for (int t = 0; t < T; t++)
    for (int r = 0; r < R; r++) out[t][r] = sum(sums[t][r]);
}

// Ranks past a multiple of kRanks are computed one by one.
template <int T, class X, class W>
inline void dots_of(int64_t ranks, const X* const* x, const W* down, int64_t inputs,
                    float* const* out) {
  if (ranks == kRanks) return dots<T, kRanks>(x, down, inputs, out);
  for (int64_t r = 0; r < ranks; r++) {
    float* to[T];
    for (int t = 0; t < T; t++) to[t] = out[t] + r;
    dots<T, 1>(x, down + r * inputs, inputs, to);
  }
}

template <class X, class W>
void shrink(const Job& job, int64_t part, const X* x, int64_t stride, int64_t inputs) {
  int64_t first = part / job.rank_parts() * kTokens, rank = part % job.rank_parts() * kRanks;
  int64_t last = first + kTokens < job.count ? first + kTokens : job.count;
  int64_t ranks = job.rank - rank < kRanks ? job.rank - rank : kRanks;
  auto down = static_cast<const W*>(job.down) + rank * inputs;
  for (int64_t t = first; t < last; t += 4) {
    int64_t count = last - t < 4 ? last - t : 4;
    const X* from[4];
    float* to[4];
    for (int64_t i = 0; i < count; i++) {
      from[i] = x + job.tokens[t + i] * stride;
      to[i] = job.narrow + (t + i) * job.rank + rank;
    }
    switch (count) {
      case 4: dots_of<4>(ranks, from, down, inputs, to); break;
      case 3: dots_of<3>(ranks, from, down, inputs, to); break;
      case 2: dots_of<2>(ranks, from, down, inputs, to); break;
      default: dots_of<1>(ranks, from, down, inputs, to);
    }
  }
}

// The narrow rows of a table: entries of down [entries, rank], or zeros.
template <class W>
void look_up(const Job& job, int64_t part, const int64_t* ids, int64_t entries) {
  if (part % job.rank_parts()) return;
  int64_t first = part / job.rank_parts() * kTokens;
  int64_t last = first + kTokens < job.count ? first + kTokens : job.count;
  for (int64_t t = first; t < last; t++) {
    int64_t id = ids[job.tokens[t]];
    bool inside = id >= 0 && id < entries;
    auto from = static_cast<const W*>(job.down) + (inside ? id : 0) * job.rank;
    float* to = job.narrow + t * job.rank;
    for (int64_t r = 0; r < job.rank; r++) to[r] = inside ? load_one(from + r) : 0.0f;
  }
}

// out[t] += sum over r of narrow[t][r] up[r], V vectors of columns and T tokens at a time; `lanes`
// are the columns of a single vector at the end, or 0. Rows of `up` lie far apart: columns that
// follow are fetched, of the thread's next task, too.
template <int T, int V, bool kTail, class O, class W>
inline void add_up(const float* const* narrow, int64_t rank, const W* up, int64_t size, int lanes,
                   O* const* out) {
  vf sums[T][V] = {};
  for (int64_t r = 0; r < rank; r++) {
    vf w[V];
    for (int v = 0; v < V; v++) {
      const W* from = up + r * size + v * kLanes;
      w[v] = kTail ? load_some(from, lanes) : load(from);
    }
    if (!kTail) __builtin_prefetch(up + r * size + kAhead);
    for (int t = 0; t < T; t++) {
      vf h = spread(narrow[t][r]);
      for (int v = 0; v < V; v++) sums[t][v] = fma_step(sums[t][v], h, w[v]);
    }
  }
  for (int t = 0; t < T; t++)
    for (int v = 0; v < V; v++) {
      O* to = out[t] + v * kLanes;
      if (kTail) store_some(to, load_some(to, lanes) + sums[t][v], lanes);
      else store(to, load(to) + sums[t][v]);
    }
}

template <int T, class O, class W>
inline void add_rows(const float* const* narrow, int64_t rank, const W* up, int64_t size,
                     int64_t columns, O* const* out) {
  O* to[T];
  for (int64_t at = 0; at < columns;) {
    for (int t = 0; t < T; t++) to[t] = out[t] + at;
    int64_t left = columns - at;
    if (left >= 2 * kLanes) {
      add_up<T, 2, false>(narrow, rank, up + at, size, 0, to);
      at += 2 * kLanes;
    } else if (left >= kLanes) {
      add_up<T, 1, false>(narrow, rank, up + at, size, 0, to);
      at += kLanes;
    } else {
      return add_up<T, 1, true>(narrow, rank, up + at, size, int(left), to);
    }
  }
}

template <class O, class W>
void expand(const Job& job, int64_t part, O* out, int64_t stride) {
  int64_t first = part / job.column_parts() * kTokens, at = part % job.column_parts() * kColumns;
  int64_t last = first + kTokens < job.count ? first + kTokens : job.count;
  int64_t columns = job.size - at < kColumns ? job.size - at : kColumns;
  auto up = static_cast<const W*>(job.up) + at;
  for (int64_t t = first; t < last;) {
    int64_t left = last - t, count = left >= kSide ? kSide : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const float* from[kSide];
    O* to[kSide];
    for (int64_t i = 0; i < count; i++) {
      from[i] = job.narrow + (t + i) * job.rank;
      to[i] = out + job.tokens[t + i] * stride + job.start + at;
    }
    switch (count) {
#if defined(__AVX512F__)
      case 8: add_rows<8>(from, job.rank, up, job.size, columns, to); break;
#endif
      case 4: add_rows<4>(from, job.rank, up, job.size, columns, to); break;
      case 2: add_rows<2>(from, job.rank, up, job.size, columns, to); break;
      default: add_rows<1>(from, job.rank, up, job.size, columns, to);
    }
    t += count;
  }
}

// The job that a task belongs to; `first` is where each one's tasks begin.
template <class F>
const Job& job_of(const std::vector<Job>& jobs, int64_t task, F&& first) {
  size_t low = 0, high = jobs.size();
  while (high - low > 1) {
    size_t middle = (low + high) / 2;
    (first(jobs[middle]) <= task ? low : high) = middle;
  }
  return jobs[low];
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// spans: the number of used slots, then slot, begin and end in `order` of each. addresses: [slots,
// pieces, 5]. x_dtype -1: x has int64 ids, and `inputs` is the number of entries of the table.
MODULM_API void modulm_add_lora(void* out, int64_t out_stride, int out_dtype, const void* x,
                                int64_t x_stride, int x_dtype, int64_t inputs, const int32_t* spans,
                                const int32_t* order, const int64_t* addresses, int64_t pieces,
                                int dtype) {
  static thread_local std::vector<Job> jobs;
  jobs.clear();
  int64_t narrow = 0, shrinks = 0, expands = 0;
  for (int32_t i = 0; i < spans[0]; i++) {
    const int32_t* span = spans + 1 + 3 * i;
    for (int64_t p = 0; p < pieces; p++) {
      const int64_t* at = addresses + (span[0] * pieces + p) * kFields;
      if (!at[0]) continue;
      Job job{at[0], at[3], at[4], reinterpret_cast<const void*>(at[1]),
              reinterpret_cast<const void*>(at[2]), order + span[1], span[2] - span[1], nullptr,
              shrinks, expands};
      narrow += job.count * job.rank;
      shrinks += job.token_parts() * job.rank_parts();
      expands += job.token_parts() * job.column_parts();
      jobs.push_back(job);
    }
  }
  if (jobs.empty()) return;
  float* place = static_cast<float*>(scratch(kScratch, narrow * int64_t(sizeof(float))));
  for (Job& job : jobs) job.narrow = place, place += job.count * job.rank;
  const std::vector<Job>& all = jobs;  // the caller's, not one per thread
  with_float(dtype, [&](auto w) {
    using W = decltype(w);
    auto shrunk = [&](int64_t task, auto&& f) {
      const Job& job = job_of(all, task, [](const Job& j) { return j.shrink; });
      f(job, task - job.shrink);
    };
    if (x_dtype == kIds) {
      parallel_near(shrinks, [&](int64_t task) {
        shrunk(task, [&](const Job& job, int64_t part) {
          look_up<W>(job, part, static_cast<const int64_t*>(x), inputs);
        });
      });
    } else {
      with_float(x_dtype, [&](auto v) {
        using X = decltype(v);
        parallel_near(shrinks, [&](int64_t task) {
          shrunk(task, [&](const Job& job, int64_t part) {
            shrink<X, W>(job, part, static_cast<const X*>(x), x_stride, inputs);
          });
        });
      });
    }
    with_float(out_dtype, [&](auto o) {
      using O = decltype(o);
      parallel_near(expands, [&](int64_t task) {
        const Job& job = job_of(all, task, [](const Job& j) { return j.expand; });
        expand<O, W>(job, task - job.expand, static_cast<O*>(out), out_stride);
      });
    });
  });
}
MODULM_REPLAYABLE(add_lora)
