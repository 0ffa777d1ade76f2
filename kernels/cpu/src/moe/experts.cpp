// out[T, H] = the weighted sum, over the experts a token chose, of down(act(gate_up(x))).
//
// Two passes over (token, expert) pairs sorted by expert. In the first a task is some panels of the
// inner columns of one expert: gate and up of the same columns are multiplied, and the activations
// are stored as bf16, or as fp32 if weights are fp32 or fp16. If `down` multiplies integers, the
// last thread to work on an expert quantizes its rows. In the second pass, a task is some panels of
// the result: it goes through all experts in order and adds their contributions in fp32. Every
// weight is read once, by one thread, whatever the number of tokens (up to large prompts). There is
// no barrier between the passes: a task of the second waits only for the inner columns of each
// expert.
#include <sched.h>

#include "base/math.h"
#include "base/replay.h"
#include "moe/plan.h"

namespace modulm {
namespace {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

constexpr int64_t kTokens = 512;  // whose totals a task of the second pass computes

enum GateKind : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kClampedSwiglu = 3 };

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

float* expert_sums(const Stack& s, int64_t rows, int64_t panels) {
  int64_t bytes = panels * room(s.first, rows) * kPanel * int64_t(sizeof(float));
  return static_cast<float*>(scratch(kMoeSums, bytes));
}

// Panels of the inner columns of one expert, for a block of its rows.
struct GateTask {
  const Run& block;
  int64_t first, count;
};

// Panels run fastest, so that a block of rows stays cached while weights stream past it.
GateTask gate_task(const Step& s, int64_t task) {
  int64_t each = div_up(s.gate_up.panels(), s.gate_panels);
  int64_t first = task % each * s.gate_panels, left = s.gate_up.panels() - first;
  return {s.blocks[task / each], first, left < s.gate_panels ? left : s.gate_panels};
}

// The first two panels that a task reads together, or null.
struct Heads {
  const uint8_t *first = nullptr, *second = nullptr;
};

// Two panels that are read next; their scales are prefetched immediately.
Heads upcoming(const PanelOf& first, const PanelOf& second) {
  fetch_scales(first);
  fetch_scales(second);
  return {first.data(), second.data()};
}

Heads gate_heads(const Step& s, int64_t task) {
  const GateTask t = gate_task(s, task);
  return upcoming(PanelOf(s.gate_up, t.block.expert, 0, t.first),
                  PanelOf(s.gate_up, t.block.expert, 1, t.first));
}
Heads down_heads(const Step& s, int64_t expert, int64_t panel) {
  int64_t second = panel + 1 < s.down.panels() ? panel + 1 : panel;
  return upcoming(PanelOf(s.down, expert, 0, panel), PanelOf(s.down, expert, 0, second));
}

// Quantizes the activations of one run to integers.
void round_inner(const Step& s, const Run& run) {
  int64_t stride = s.down.padded_k();
  auto inner = static_cast<const bf16*>(s.inner);
  for (int64_t r = 0; r < run.count; r++)
    quantize_row(s.rounded_inner, s.down.first, inner + (run.first + r) * stride, kBF16,
                 run.place + r);
}

void finish_task(const Step& s, int64_t run) {
  int64_t left = s.unfinished[run].fetch_sub(1, std::memory_order_acq_rel) - 1;
  if (left != 1 || !s.down.first.integer()) return;
  round_inner(s, s.runs[run]);
  s.unfinished[run].fetch_sub(1, std::memory_order_release);
}

// inner = act(gate, up) of one panel
void store_inner(const Step& s, const Run& block, int64_t panel, float* gate, float* up) {
  int64_t inner = s.gate_up.first.n, column = panel * kPanel, stride = s.down.padded_k();
  int64_t columns = inner - column < kPanel ? inner - column : kPanel;
  add_bias(s.gate_up_bias, block.expert, column, columns, block.count, gate);
  add_bias(s.gate_up_bias, block.expert, inner + column, columns, block.count, up);
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

// Integers are read as one stream: all panels of gate and then all of up.
void gate_panels(const Step& s, const GateTask& t, Heads following) {
  const Run& block = t.block;
  const int64_t size = room(s.gate_up.first, block.count) * kPanel;
  float *gate = expert_sums(s.gate_up, block.count, 2 * t.count), *up = gate + t.count * size;
  const Inputs in{block.x, s.ldx, &s.rounded_inputs, s.shared ? 0 : block.place};
  auto panel_of = [&](int part, int64_t i) {
    return PanelOf(s.gate_up, block.expert, part, t.first + i);
  };
  if (t.count == 1) {
    two_panel_sums(panel_of(0, 0), panel_of(1, 0), in, block.count, gate, following.first,
                   following.second);
  } else {
    for (int64_t i = 0; i < 2 * t.count; i++) {
      auto at = [&](int64_t i) { return panel_of(i >= t.count, i % t.count); };
      const uint8_t* next = i + 1 < 2 * t.count ? at(i + 1).data() : following.first;
      panel_sums(at(i), in, block.count, gate + i * size, next);
    }
  }
  for (int64_t i = 0; i < t.count; i++)
    store_inner(s, block, t.first + i, gate + i * size, up + i * size);
  finish_task(s, block.index);
}

// Pairs of a run whose totals are computed: `rows` from `first` on.
struct Part {
  const Run& run;
  int64_t first, rows;
};

// The panels of the result and the tokens whose totals a task computes.
struct Area {
  int64_t start, tokens;
  int64_t panel, panels;
};

// totals[token][panels * 64] += weight * the panel's sums
void add_weighted(const Step& s, const Part& part, const Area& area, int64_t panel, float* sums,
                  float* totals) {
  int64_t column = panel * kPanel, left = s.down.first.n - column;
  add_bias(s.down_bias, part.run.expert, column, left < kPanel ? left : kPanel, part.rows, sums);
  int64_t size = area.panels * kPanel, width = s.down.first.width(panel);
  for (int64_t r = 0; r < part.rows; r++) {
    float* to = totals + (s.token[part.first + r] - area.start) * size +
                (panel - area.panel) * kPanel;
    float factor = s.weight[part.first + r];
    for (int64_t c = 0; c < width; c += kLanes)
      store(to + c, load(to + c) + load(sums + r * kPanel + c) * factor);
  }
}

void add_expert(const Step& s, const Part& part, const Area& area, float* totals,
                Heads following) {
  float* sums = expert_sums(s.down, part.rows, 2);
  int64_t stride = s.down.padded_k(), end = area.panel + area.panels;
  Inputs in{offset(s.inner, part.first * stride, s.down), stride, &s.rounded_inner,
            part.run.place + part.first - part.run.first};
  for (int64_t i = area.panel; i < end; i += 2) {
    PanelOf weight(s.down, part.run.expert, 0, i);
    Heads next = i + 2 < end ? down_heads(s, part.run.expert, i + 2) : following;
    if (i + 1 < end)
      two_panel_sums(weight, PanelOf(s.down, part.run.expert, 0, i + 1), in, part.rows, sums,
                     next.first, next.second);
    else panel_sums(weight, in, part.rows, sums, next.first);
    for (int64_t j = i; j < end && j < i + 2; j++)
      add_weighted(s, part, area, j, sums + (j - i) * room(s.down.first, part.rows) * kPanel,
                   totals);
  }
}

void deliver(const Step& s, const Area& area, const float* totals) {
  int64_t first = area.panel * kPanel, size = area.panels * kPanel;
  int64_t columns = s.down.first.n - first < size ? s.down.first.n - first : size;
  with_float(s.dtype, [&](auto t) {
    for (int64_t r = 0; r < area.tokens; r++) {
      auto to = static_cast<decltype(t)*>(s.out) + (area.start + r) * s.ldo + first;
      const float* from = totals + r * size;
      for_lanes(columns, [&](int64_t c, int n) { store_n(to + c, load(from + c), n); });
    }
  });
}

// Waits until all inner columns of a run are computed. Threads that compute them never wait.
void await_inner(const Step& s, int64_t run) {
  for (int tries = 0; s.unfinished[run].load(std::memory_order_acquire); tries++) {
    if (tries < 10000) relax();
    else sched_yield();
  }
}

void down_panels(const Step& s, const Area& area, const Area& following) {
  int64_t bytes = area.tokens * area.panels * kPanel * int64_t(sizeof(float));
  auto totals = static_cast<float*>(scratch(kMoeTotals, bytes));
  std::memset(totals, 0, bytes);
  int64_t most = rows_at_once(s.down), last = area.start + area.tokens;
  for (int64_t i = 0; i < s.run_count; i++) {
    const Run& run = s.runs[i];
    int64_t first = run.first, end = run.first + run.count;
    while (first < end && s.token[first] < area.start) first++;
    while (end > first && s.token[end - 1] >= last) end--;
    bool more = i + 1 < s.run_count;
    Heads next = more ? down_heads(s, s.runs[i + 1].expert, area.panel)
                      : down_heads(s, s.runs[0].expert, following.panel);
    await_inner(s, i);
    for (; first < end; first += most)
      add_expert(s, {run, first, end - first < most ? end - first : most}, area, totals, next);
  }
  deliver(s, area, totals);
}

void leave_tiles() {
#if defined(__AMX_BF16__)
  tiles.release();
#endif
}

// The tasks of the second pass. Panels run fastest.
struct DownTasks {
  int64_t many, columns, all, tokens;

  explicit DownTasks(const Step& s) : all(s.down.panels()), tokens(s.tokens) {
    many = panels(s.down.first.integer(), all / threads());
    columns = div_up(all, many);
  }
  // Integers for few tokens are read in longer streams. share: panels of a thread.
  int64_t panels(bool integer, int64_t share) const {
    if (tokens >= kManyTokens || (integer && tokens == 1 && share >= 8)) return kMostPanels;
    const int64_t most = integer && tokens > 1 ? 2 * kMostPanels : 2;
    return share < 1 ? 1 : share < most ? share : most;
  }
  int64_t count() const { return columns * div_up(tokens, kTokens); }
  Area operator[](int64_t task) const {
    int64_t panel = task % columns * many, start = task / columns * kTokens;
    return {start, tokens - start < kTokens ? tokens - start : kTokens, panel,
            all - panel < many ? all - panel : many};
  }
};

void both_passes(const Step& s) {
  DownTasks downs(s);
  Spans first(s.block_count * div_up(s.gate_up.panels(), s.gate_panels)), second(downs.count());
  int64_t workers = first.count() > second.count() ? first.count() : second.count();
  auto work = [&](int64_t own, int) {
    int64_t end = first.begin(own + 1), begin = second.begin(own);
    first.work(own, [&](int64_t task) {
      Heads next = task + 1 < end      ? gate_heads(s, task + 1)
                   : begin < downs.count() ? down_heads(s, s.runs[0].expert, downs[begin].panel)
                                           : Heads{};
      gate_panels(s, gate_task(s, task), next);
    });
    second.work(own, [&](int64_t task) {
      int64_t next = task + 1 < downs.count() ? task + 1 : task;
      down_panels(s, downs[task], downs[next]);
    });
    leave_tiles();
  };
  parallel(workers, work, true);
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// weights, ids: [tokens][top_k]. Stacks: as `modulm_linear` takes a weight, of the first matrix.
// Biases: [experts][2 inner] and [experts][hidden] or null. Both stacks are wide or neither is.
// Returns 0, or 1 if an id is not in [0, experts).
MODULM_API int modulm_experts(const void* x, int64_t ldx, int64_t tokens, int dtype,
                              const float* weights, const int64_t* ids, int64_t top_k,
                              int64_t experts, int64_t hidden, int64_t inner,
                              const void* gate_up_data, const void* gate_up_scales,
                              const void* gate_up_zeros, int64_t gate_up_group, int gate_up_form,
                              const void* down_data, const void* down_scales,
                              const void* down_zeros, int64_t down_group, int down_form,
                              const void* gate_up_bias, const void* down_bias, int bias_dtype,
                              int gate, float alpha, float limit, void* out, int64_t ldo) {
  if (tokens == 0) return 0;
  Stack first{weight_of(gate_up_data, gate_up_scales, gate_up_zeros, inner, hidden, gate_up_group,
                        gate_up_form),
              experts, 2};
  Stack second{
      weight_of(down_data, down_scales, down_zeros, hidden, inner, down_group, down_form), experts,
      1};
  int64_t pairs = tokens * top_k, most_runs = experts < pairs ? experts : pairs;
  int64_t most_blocks = most_runs + pairs / kBlockUnit;
  int64_t bytes = (most_runs + most_blocks) * int64_t(sizeof(Run)) + pairs * 8 +
                  (experts + most_runs) * 8;
  auto runs = static_cast<Run*>(scratch(kPlan, bytes));
  auto counts = reinterpret_cast<int64_t*>(runs + most_runs + most_blocks);
  auto unfinished = reinterpret_cast<std::atomic<int64_t>*>(counts + experts);
  auto token = reinterpret_cast<int32_t*>(unfinished + most_runs);
  auto weight = reinterpret_cast<float*>(token + pairs);
  void* inners = scratch(kInner, pairs * second.padded_k() * second.input_size());
  Step step{first,
            second,
            {gate_up_bias, 2 * inner, bias_dtype},
            {down_bias, hidden, bias_dtype},
            gate,
            alpha,
            limit,
            tokens,
            pairs,
            0,
            runs,
            0,
            runs + most_runs,
            0,
            unfinished,
            1,
            token,
            weight,
            first.padded_k(),
            inners,
            false,
            {},
            {},
            out,
            ldo,
            dtype};
  if (!sort_pairs(step, ids, weights, top_k, counts)) return 1;
  if (first.first.integer()) round_inputs(step, x, ldx);
  else gather(step, x, ldx, dtype == (first.wide() ? kF32 : kBF16) && first.padded_k() == hidden);
  if (second.first.integer()) {
    void* memory = scratch(kRoundedInner, activation_bytes(step.places, second.first));
    step.rounded_inner = activations_in(memory, step.places, second.first);
  }
  cut_runs(step);
  both_passes(step);
  return 0;
}

MODULM_REPLAYABLE(experts)
