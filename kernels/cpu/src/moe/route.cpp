// Routing: the experts of each token, and their weights.
#include "base/math.h"
#include "base/pool.h"
#include "base/replay.h"

namespace modulm {
namespace {

struct Routing {
  int64_t experts, top_k;
  int sigmoid, renormalise;
  const float* bias;  // [experts] or null: added for the selection only
  int64_t groups, top_groups;
  int best_two;  // a group's score: the sum of its two best experts, otherwise its best one's
  float scale;
};

template <class T>
void score(const Routing& r, const T* logits, float* scores) {
  if (r.sigmoid) {
    for_lanes(r.experts, [&](int64_t i, int n) {
      store_n(scores + i, 1.0f / (vexp(-load_n(logits + i, n)) + 1.0f), n);
    });
    return;
  }
  float most = -__builtin_inff(), total = 0;
  for (int64_t i = 0; i < r.experts; i++) {
    scores[i] = load_one(logits + i);
    if (scores[i] > most) most = scores[i];
  }
  for_lanes(r.experts, [&](int64_t i, int n) {
    store_n(scores + i, vexp(load_n(scores + i, n) - most), n);
  });
  for (int64_t i = 0; i < r.experts; i++) total += scores[i];
  for (int64_t i = 0; i < r.experts; i++) scores[i] /= total;
}

// The largest of n that is not selected yet; the first one if several are equal.
int64_t take_best(const float* values, bool* taken, int64_t n) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; i++)
    if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
  taken[best] = true;
  return best;
}

// Marks the experts of all groups but the best ones as selected.
void limit_groups(const Routing& r, const float* ranking, float* groups, bool* chosen,
                  bool* taken) {
  int64_t size = r.experts / r.groups;
  for (int64_t g = 0; g < r.groups; g++) {
    float first = -__builtin_inff(), second = first;
    for (int64_t i = g * size; i < (g + 1) * size; i++) {
      float value = ranking[i];
      if (value > first) second = first, first = value;
      else if (value > second) second = value;
    }
    groups[g] = r.best_two ? first + second : first;
    chosen[g] = false;
  }
  for (int64_t i = 0; i < r.top_groups; i++) take_best(groups, chosen, r.groups);
  for (int64_t i = 0; i < r.experts; i++) taken[i] = !chosen[i / size];
}

void choose(const Routing& r, const float* scores, float* work, bool* taken, float* weights,
            int64_t* ids) {
  float* ranking = work;
  for (int64_t i = 0; i < r.experts; i++) ranking[i] = scores[i] + (r.bias ? r.bias[i] : 0.0f);
  if (r.groups > 1) limit_groups(r, ranking, work + r.experts, taken + r.experts, taken);
  else std::memset(taken, 0, r.experts);
  float total = 0;
  for (int64_t i = 0; i < r.top_k; i++) {
    ids[i] = take_best(ranking, taken, r.experts);
    total += weights[i] = scores[ids[i]];
  }
  float factor = r.renormalise ? r.scale / total : r.scale;
  for (int64_t i = 0; i < r.top_k; i++) weights[i] *= factor;
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// logits: [rows][experts], row stride `stride`; weights, ids: [rows][top_k].
MODULM_API void modulm_moe_route(const void* logits, int64_t stride, int64_t rows, int dtype,
                                 int64_t experts, int64_t top_k, int sigmoid, int renormalise,
                                 const float* bias, int64_t groups, int64_t top_groups,
                                 int best_two, float scale, float* weights, int64_t* ids) {
  Routing r{experts, top_k, sigmoid, renormalise, bias, groups, top_groups, best_two, scale};
  with_float(dtype, [&](auto t) {
    auto from = static_cast<const decltype(t)*>(logits);
    parallel_runs(rows, 4096 / experts + 1, [&](int64_t begin, int64_t end) {
      auto scores = static_cast<float*>(scratch(0, experts * 16));
      auto taken = reinterpret_cast<bool*>(scores + 3 * experts);
      for (int64_t i = begin; i < end; i++) {
        score(r, from + i * stride, scores);
        choose(r, scores, scores + experts, taken, weights + i * top_k, ids + i * top_k);
      }
    });
  });
}

MODULM_REPLAYABLE(moe_route)
