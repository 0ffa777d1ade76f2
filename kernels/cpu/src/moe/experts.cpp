// out[T, H] = the weighted sum, over the experts a token chose, of down(act(gate_up(x))).
//
// Two passes over (token, expert) pairs sorted by expert. In the first a task is one panel of the
// inner columns of one expert: gate and up of the same columns are multiplied, and what the gate
// gives goes to memory as bf16, or as fp32 where weights are fp32 or fp16. In the second a task is some panels of the result: it goes through
// all experts in order and adds what they give in fp32. Every weight that is needed is read once
// by one thread, whatever the number of tokens (up to large prompts), and all pairs of a small
// step share one claim loop.
#include <atomic>

#include "base/math.h"
#include "base/replay.h"
#include "moe/panel.h"

namespace modulm {
namespace {

constexpr int64_t kBlockBytes = 512 << 10;  // of a block of rows: half of a second-level cache
constexpr int64_t kBlockUnit = 96;          // a multiple of every kBlockRows
constexpr int64_t kTokens = 512;            // whose totals a task of the second pass holds
constexpr int64_t kManyTokens = 64;         // from which on its tasks have several panels
constexpr int64_t kPanelsPerTask = 4;

enum GateKind : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kClampedSwiglu = 3 };

struct Bias {
  const void* data;  // [experts][n] or null
  int64_t n;
  int dtype;
};

// Pairs of one expert: `count` from `first` on in the sorted order. `x` are their inputs.
struct Run {
  int64_t expert, first, count;
  const void* x;
};

struct Step {
  const Stack& gate_up;
  const Stack& down;
  Bias gate_up_bias, down_bias;
  int gate;
  float alpha, limit;

  int64_t tokens, pairs;
  Run* runs;
  int64_t run_count;
  Run* blocks;  // the runs, cut into blocks of rows
  int64_t block_count;
  int32_t* token;  // [pairs], sorted by expert, then by token
  float* weight;   // [pairs]
  int64_t ldx;
  void* inner;  // [pairs][padded inner] in the dtype of activations
  void* out;
  int64_t ldo;
  int dtype;
};

const void* offset(const void* x, int64_t elements, const Stack& s) {
  return static_cast<const uint8_t*>(x) + elements * s.input_size();
}

// f(one number of the dtype that `s` multiplies)
template <class F>
void with_input(const Stack& s, F&& f) {
  if (s.wide()) f(float{});
  else f(bf16{});
}

template <class F>
void with_gate(const Step& s, F&& f) {
  switch (s.gate) {
    case kSilu: return f([](vf gate, vf up) { return silu(gate) * up; });
    case kGelu: return f([](vf gate, vf up) { return gelu_erf(gate) * up; });
    case kGeluTanh: return f([](vf gate, vf up) { return gelu_tanh(gate) * up; });
    default:
      vf most = splat(s.limit);
      return f([=](vf gate, vf up) {
        gate = gate > most ? most : gate;
        up = up > most ? most : up < -most ? -most : up;
        return (up + 1.0f) * gate / (vexp(gate * -s.alpha) + 1.0f);
      });
  }
}

void add_bias(const Bias& bias, int64_t expert, int64_t column, int64_t columns, int64_t rows,
              float* sums) {
  if (!bias.data) return;
  with_float(bias.dtype, [&](auto t) {
    auto values = static_cast<const decltype(t)*>(bias.data) + expert * bias.n + column;
    for_lanes(columns, [&](int64_t c, int n) {
      vf value = load_n(values + c, n);
      for (int64_t r = 0; r < rows; r++) {
        float* to = sums + r * kPanel + c;
        store(to, load(to) + value);
      }
    });
  });
}

float* sums_of(int64_t rows, int64_t matrices) {
  return static_cast<float*>(
      scratch(kMoeSums, matrices * rows * kPanel * int64_t(sizeof(float))));
}

// The first panel that a task of a pass reads; null past the last task.
const uint8_t* gate_head(const Step& s, int64_t task) {
  int64_t panels = s.gate_up.panels();
  if (task >= s.block_count * panels) return nullptr;
  return PanelOf(s.gate_up, s.blocks[task / panels].expert, 0, task % panels).data;
}
const uint8_t* down_head(const Step& s, int64_t panel) {
  return panel < s.down.panels() ? PanelOf(s.down, s.runs[0].expert, 0, panel).data : nullptr;
}

void gate_panel(const Step& s, const Run& block, int64_t panel, const uint8_t* following) {
  int64_t inner = s.gate_up.n, column = panel * kPanel, stride = s.down.padded_k();
  int64_t columns = inner - column < kPanel ? inner - column : kPanel;
  float* gate = sums_of(block.count, 2);
  float* up = gate + block.count * kPanel;
  for (int part = 0; part < 2; part++) {
    float* sums = part ? up : gate;
    PanelOf weight(s.gate_up, block.expert, part, panel);
    const uint8_t* next = part ? following : PanelOf(s.gate_up, block.expert, 1, panel).data;
    panel_sums(weight, block.x, s.ldx, block.count, sums, next);
    add_bias(s.gate_up_bias, block.expert, part * inner + column, columns, block.count, sums);
  }
  int64_t written = panel + 1 == s.gate_up.panels() ? stride - column : kPanel;
  with_input(s.down, [&](auto t) {
    auto inner = static_cast<decltype(t)*>(s.inner);
    with_gate(s, [&](auto act) {
      for (int64_t r = 0; r < block.count; r++) {
        auto to = inner + (block.first + r) * stride + column;
        const float *a = gate + r * kPanel, *b = up + r * kPanel;
        for (int64_t c = 0; c < written; c += kLanes)
          store(to + c, c < columns ? act(load(a + c), load(b + c)) : vf{});
      }
    });
  });
}

// totals[token][panels * 64] += weight * what the run's expert gives for its pairs from `first` on.
void add_expert(const Step& s, const Run& run, int64_t first, int64_t rows, int64_t panel,
                int64_t panels, int64_t start, float* totals, const uint8_t* following) {
  float* sums = sums_of(rows, 1);
  int64_t stride = s.down.padded_k(), size = panels * kPanel;
  for (int64_t i = 0; i < panels; i++) {
    int64_t column = (panel + i) * kPanel;
    int64_t columns = s.down.n - column < kPanel ? s.down.n - column : kPanel;
    PanelOf weight(s.down, run.expert, 0, panel + i);
    panel_sums(weight, offset(s.inner, first * stride, s.down), stride, rows, sums,
               i + 1 < panels ? weight.end() : following);
    add_bias(s.down_bias, run.expert, column, columns, rows, sums);
    for (int64_t r = 0; r < rows; r++) {
      float* to = totals + (s.token[first + r] - start) * size + i * kPanel;
      float factor = s.weight[first + r];
      for (int c = 0; c < weight.width; c += kLanes)
        store(to + c, load(to + c) + load(sums + r * kPanel + c) * factor);
    }
  }
}

void deliver(const Step& s, int64_t start, int64_t tokens, int64_t panel, int64_t panels,
             const float* totals) {
  int64_t first = panel * kPanel, size = panels * kPanel;
  int64_t columns = s.down.n - first < size ? s.down.n - first : size;
  with_float(s.dtype, [&](auto t) {
    for (int64_t r = 0; r < tokens; r++) {
      auto to = static_cast<decltype(t)*>(s.out) + (start + r) * s.ldo + first;
      for_lanes(columns, [&](int64_t c, int n) { store_n(to + c, load(totals + r * size + c), n); });
    }
  });
}

int64_t rows_at_once(const Stack& s) {
  int64_t units = kBlockBytes / (s.padded_k() * s.input_size()) / kBlockUnit;
  return kBlockUnit * (units < 1 ? 1 : units > 4 ? 4 : units);
}

void down_panels(const Step& s, int64_t start, int64_t tokens, int64_t panel, int64_t panels,
                 const uint8_t* following) {
  int64_t bytes = tokens * panels * kPanel * int64_t(sizeof(float));
  auto totals = static_cast<float*>(scratch(kMoeTotals, bytes));
  std::memset(totals, 0, bytes);
  int64_t most = rows_at_once(s.down);
  for (int64_t i = 0; i < s.run_count; i++) {
    const Run& run = s.runs[i];
    int64_t first = run.first, end = run.first + run.count;
    while (first < end && s.token[first] < start) first++;
    while (end > first && s.token[end - 1] >= start + tokens) end--;
    const uint8_t* next =
        i + 1 < s.run_count ? PanelOf(s.down, s.runs[i + 1].expert, 0, panel).data : following;
    for (; first < end; first += most)
      add_expert(s, run, first, end - first < most ? end - first : most, panel, panels, start,
                 totals, next);
  }
  deliver(s, start, tokens, panel, panels, totals);
}

void leave_tiles() {
#if defined(__AMX_BF16__)
  tiles.release();
#endif
}

// f(task, claimed) for every task; `claimed` counts those claimed so far and so is the number of
// the task that this thread will most likely do next.
template <class F>
void claim(int64_t tasks, F&& f) {
  std::atomic<int64_t> claimed{0};
  parallel(tasks < threads() ? tasks : threads(), [&](int64_t, int) {
    for (int64_t mine; (mine = claimed.fetch_add(1, std::memory_order_relaxed)) < tasks;)
      f(mine, claimed);
    leave_tiles();
  });
}

void both_passes(const Step& s) {
  int64_t panels = s.gate_up.panels(), gates = s.block_count * panels;
  // Panels run fastest, so that a block of rows stays cached while weights stream past it.
  claim(gates, [&](int64_t task, const std::atomic<int64_t>& claimed) {
    int64_t next = claimed.load(std::memory_order_relaxed);
    const uint8_t* head = next < gates ? gate_head(s, next) : down_head(s, next - gates);
    gate_panel(s, s.blocks[task / panels], task % panels, head);
  });
  int64_t many = s.tokens >= kManyTokens ? kPanelsPerTask : 1, all = s.down.panels();
  int64_t columns = div_up(all, many);
  claim(columns * div_up(s.tokens, kTokens), [&](int64_t task, const std::atomic<int64_t>& claimed) {
    int64_t panel = task % columns * many, start = task / columns * kTokens;
    int64_t tokens = s.tokens - start < kTokens ? s.tokens - start : kTokens;
    const uint8_t* head = down_head(s, claimed.load(std::memory_order_relaxed) % columns * many);
    down_panels(s, start, tokens, panel, all - panel < many ? all - panel : many, head);
  });
}

// Sorts pairs by expert, keeping tokens in order; false if an id is no expert's.
bool sort_pairs(Step& s, const int64_t* ids, const float* weights, int64_t top_k,
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
    if (counts[e]) s.runs[s.run_count++] = {e, start, counts[e], nullptr};
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
void gather_rows(const Step& s, const T* x, int64_t ldx, int64_t k, int64_t padded, To* rows) {
  parallel_runs(s.pairs, 65536 / padded, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const T* from = x + s.token[r] * ldx;
      To* to = rows + r * padded;
      for_lanes(k, [&](int64_t i, int n) { store_n(to + i, load_n(from + i, n), n); });
      std::memset(to + k, 0, (padded - k) * sizeof(To));
    }
  });
}

// Inputs of each run side by side, in the dtype of activations with K padded by zeros; single rows
// that need neither are used where they lie (`direct`).
void gather(Step& s, const void* x, int64_t ldx, bool direct) {
  int64_t k = s.gate_up.k, padded = s.gate_up.padded_k();
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

void cut_runs(Step& s) {
  int64_t most = rows_at_once(s.gate_up);
  s.block_count = 0;
  for (int64_t i = 0; i < s.run_count; i++)
    for (int64_t done = 0; done < s.runs[i].count; done += most) {
      int64_t left = s.runs[i].count - done;
      s.blocks[s.block_count++] = {s.runs[i].expert, s.runs[i].first + done,
                                   left < most ? left : most, offset(s.runs[i].x, done * s.ldx, s.gate_up)};
    }
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// weights, ids: [tokens][top_k]. Biases: [experts][2 inner] and [experts][hidden] or null. Both
// stacks are wide or neither is.
// Returns 0, or 1 if an id is not in [0, experts).
MODULM_API int modulm_fused_experts(
    const void* x, int64_t ldx, int64_t tokens, int dtype, const float* weights, const int64_t* ids,
    int64_t top_k, int64_t experts, int64_t hidden, int64_t inner, const uint8_t* gate_up_data,
    const uint8_t* gate_up_scales, const bf16* gate_up_zeros, int64_t gate_up_group,
    int gate_up_format, const uint8_t* down_data, const uint8_t* down_scales,
    const bf16* down_zeros, int64_t down_group, int down_format, const void* gate_up_bias,
    const void* down_bias, int bias_dtype, int gate, float alpha, float limit, void* out,
    int64_t ldo) {
  if (tokens == 0) return 0;
  Stack first{gate_up_data, gate_up_scales, gate_up_zeros, experts, 2,
              inner,        hidden,         gate_up_group, gate_up_format};
  Stack second{down_data, down_scales, down_zeros, experts, 1,
               hidden,    inner,       down_group, down_format};
  int64_t pairs = tokens * top_k, most_runs = experts < pairs ? experts : pairs;
  int64_t most_blocks = most_runs + pairs / kBlockUnit;
  int64_t bytes = (most_runs + most_blocks) * int64_t(sizeof(Run)) + pairs * 8 + experts * 8;
  auto runs = static_cast<Run*>(scratch(kPlan, bytes));
  auto counts = reinterpret_cast<int64_t*>(runs + most_runs + most_blocks);
  auto token = reinterpret_cast<int32_t*>(counts + experts);
  auto weight = reinterpret_cast<float*>(token + pairs);
  void* inners = scratch(kInner, pairs * second.padded_k() * second.input_size());
  Step step{first, second, {gate_up_bias, 2 * inner, bias_dtype}, {down_bias, hidden, bias_dtype},
            gate,  alpha,  limit, tokens, pairs, runs, 0, runs + most_runs, 0, token, weight,
            first.padded_k(), inners, out, ldo, dtype};
  if (!sort_pairs(step, ids, weights, top_k, counts)) return 1;
  gather(step, x, ldx, dtype == (first.wide() ? kF32 : kBF16) && first.padded_k() == hidden);
  cut_runs(step);
  both_passes(step);
  return 0;
}

MODULM_REPLAYABLE(fused_experts)
