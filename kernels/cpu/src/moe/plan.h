// What a call of the experts computes, in which order: pairs of tokens and experts sorted by expert,
// their inputs, and the blocks of rows that tasks take.
#pragma once

#include <atomic>

#include "base/pool.h"
#include "moe/panel.h"

namespace modulm {

constexpr int64_t kBlockBytes = 512 << 10;  // of a block of rows: half of a second-level cache
constexpr int64_t kBlockUnit = 96;          // a multiple of every kBlockRows
constexpr int64_t kManyTokens = 64;         // from here on arithmetic is the bottleneck, not memory
constexpr int64_t kMostPanels = 4;          // of a task of the second pass
constexpr int64_t kMostGatePanels = 8;      // of gate, and as many of up, of one of the first pass
constexpr int64_t kFewTokens = 8;           // of an expert on average
constexpr int64_t kTasksPerThread = 8;      // of the first pass, if each has several panels

struct Bias {
  const void* data;  // [experts][n] or null
  int64_t n;
  int dtype;
};

// Pairs of one expert: `count` from `first` on in the sorted order. `x` are their inputs. The
// integers of a run begin at `place`, a multiple of a tile of rows.
struct Run {
  int64_t expert, first, count, place;
  const void* x;
  int64_t index;  // of the run that a block belongs to
};

struct Step {
  const Stack& gate_up;
  const Stack& down;
  Bias gate_up_bias, down_bias;
  int gate;
  float alpha, limit;

  int64_t tokens, pairs;
  int64_t places;  // of integers
  Run* runs;
  int64_t run_count;
  Run* blocks;  // the runs, cut into blocks of rows
  int64_t block_count;
  std::atomic<int64_t>* unfinished;  // [runs]: tasks of the first pass
  int64_t gate_panels;               // of such a task
  int32_t* token;  // [pairs], sorted by expert, then by token
  float* weight;   // [pairs]
  int64_t ldx;
  void* inner;  // [pairs][padded inner] in the dtype of activations
  bool shared;  // all inputs are one row of integers
  Activations rounded_inputs, rounded_inner;  // where the stack multiplies integers
  void* out;
  int64_t ldo;
  int dtype;
};

inline const void* offset(const void* x, int64_t elements, const Stack& s) {
  return static_cast<const uint8_t*>(x) + elements * s.input_size();
}

// f(one number of the dtype that `s` multiplies)
template <class F>
inline void with_input(const Stack& s, F&& f) {
  if (s.wide()) f(float{});
  else f(bf16{});
}

inline int64_t rows_at_once(const Stack& s) {
  int64_t units = kBlockBytes / (s.padded_k() * s.input_size()) / kBlockUnit;
  return kBlockUnit * (units < 1 ? 1 : units > 4 ? 4 : units);
}

// Sorts pairs by expert, keeping tokens in order; false if an id is no expert's.
inline bool sort_pairs(Step& s, const int64_t* ids, const float* weights, int64_t top_k,
                int64_t* counts) {
  int64_t experts = s.gate_up.experts;
  std::memset(counts, 0, experts * sizeof(int64_t));
  for (int64_t i = 0; i < s.pairs; i++) {
    if (ids[i] < 0 || ids[i] >= experts) return false;
    counts[ids[i]]++;
  }
  int64_t start = 0;
  s.run_count = 0;
  for (int64_t e = 0; e < experts; e++) {
    if (counts[e]) {
      s.runs[s.run_count] = {e, start, counts[e], s.places, nullptr, s.run_count};
      s.run_count++;
      s.places += div_up(counts[e], kRowTile) * kRowTile;
    }
    start += counts[e];
    counts[e] = start - counts[e];
  }
  for (int64_t i = 0; i < s.pairs; i++) {
    int64_t place = counts[ids[i]]++;
    s.token[place] = int32_t(i / top_k);
    s.weight[place] = weights[i];
  }
  return true;
}

template <class T, class To>
inline void gather_rows(const Step& s, const T* x, int64_t ldx, int64_t k, int64_t padded, To* rows) {
  parallel_runs(s.pairs, 65536 / padded, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const T* from = x + s.token[r] * ldx;
      To* to = rows + r * padded;
      for_lanes(k, [&](int64_t i, int n) { store_n(to + i, load_n(from + i, n), n); });
      std::memset(to + k, 0, (padded - k) * sizeof(To));
    }
  });
}

// Gathers the inputs of each run, in the dtype of activations and with K padded by zeros; single
// rows that need neither are used in place (`direct`).
inline void gather(Step& s, const void* x, int64_t ldx, bool direct) {
  int64_t k = s.gate_up.first.k, padded = s.gate_up.padded_k();
  if (direct) {
    bool single = true;
    for (int64_t i = 0; i < s.run_count; i++) single = single && s.runs[i].count == 1;
    if (single) {
      for (int64_t i = 0; i < s.run_count; i++)
        s.runs[i].x = offset(x, s.token[s.runs[i].first] * ldx, s.gate_up);
      return;
    }
  }
  void* rows = scratch(kGathered, s.pairs * padded * s.gate_up.input_size());
  with_input(s.gate_up, [&](auto wanted) {
    with_float(s.dtype, [&](auto given) {
      gather_rows(s, static_cast<const decltype(given)*>(x), ldx, k, padded,
                  static_cast<decltype(wanted)*>(rows));
    });
  });
  for (int64_t i = 0; i < s.run_count; i++)
    s.runs[i].x = offset(rows, s.runs[i].first * padded, s.gate_up);
}

// Quantizes the inputs: one row in place, several at the positions of their runs.
inline void round_inputs(Step& s, const void* x, int64_t ldx) {
  const Weight& w = s.gate_up.first;
  Activations rows = quantize(x, ldx, s.tokens, s.dtype, w);
  s.shared = s.tokens == 1;
  if (s.shared) {
    s.rounded_inputs = rows;
    return;
  }
  void* memory = scratch(kRoundedInputs, activation_bytes(s.places, w));
  s.rounded_inputs = activations_in(memory, s.places, w);
  parallel(s.run_count, [&](int64_t i, int) {
    const Run& run = s.runs[i];
    for (int64_t r = 0; r < run.count; r++)
      copy_row(s.rounded_inputs, w, rows, s.token[run.first + r], run.place + r);
  });
}

// Integers for few tokens are read in longer streams: several panels of an expert, divided evenly.
inline int64_t panels_of_gate_task(const Step& s) {
  if (!s.gate_up.first.integer() || s.pairs > kFewTokens * s.run_count) return 1;
  const int64_t all = s.gate_up.panels();
  int64_t many = s.run_count * all / (kTasksPerThread * threads());
  many = many < 1 ? 1 : many < kMostGatePanels ? many : kMostGatePanels;
  return div_up(all, div_up(all, many));
}

inline void cut_runs(Step& s) {
  s.gate_panels = panels_of_gate_task(s);
  int64_t tasks = div_up(s.gate_up.panels(), s.gate_panels);
  int64_t more = s.down.first.integer();  // quantization of the activations
  int64_t most = rows_at_once(s.gate_up);
  s.block_count = 0;
  for (int64_t i = 0; i < s.run_count; i++) {
    const Run& run = s.runs[i];
    s.unfinished[i].store(div_up(run.count, most) * tasks + more,
                          std::memory_order_relaxed);
    for (int64_t done = 0; done < run.count; done += most) {
      int64_t left = run.count - done;
      s.blocks[s.block_count++] = {run.expert, run.first + done, left < most ? left : most,
                                   run.place + done, offset(run.x, done * s.ldx, s.gate_up), i};
    }
  }
}

}  // namespace modulm
