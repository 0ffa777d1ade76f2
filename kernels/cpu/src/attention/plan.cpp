#include "attention/plan.h"

#include <algorithm>

#include "base/pool.h"

namespace modulm {
namespace {

static_assert(sizeof(PlanHead) == sizeof(Tile), "the head takes the place of a tile");

// With more rows per tile, keys and values are read and converted less often; with fewer, more
// threads have work.
constexpr int64_t kMostRows = 128, kLeastRows = 32;

int64_t tile_rows(const Step& step) {
  int64_t rows = kMostRows, all = step.query_starts[step.sequences] * step.group * step.heads;
  while (rows > kLeastRows && div_up(all, rows) < 4 * threads()) rows /= 2;
  return rows;
}

Tile make_tile(const Step& step, int64_t sequence, int64_t first, int64_t rows) {
  int64_t length = step.context_lens[sequence];
  int64_t fresh = step.query_starts[sequence + 1] - step.query_starts[sequence];
  int64_t low = length - fresh + first / step.group;
  int64_t high = length - fresh + (first + rows - 1) / step.group;
  int64_t begin = step.window > 0 ? std::max<int64_t>(low - step.window + 1, 0) : 0;
  const bool masked = step.masks && step.masks[step.query_starts[sequence]];
  int64_t end = step.causal && !masked ? high + 1 : length;
  if (step.window > 0) end = std::min(end, high + step.window);
  return {int32_t(sequence), int32_t(first), int32_t(rows), int32_t(begin), int32_t(end), 0};
}

int64_t cost(const Tile& t) { return int64_t(t.rows + 8) * (t.end - t.begin); }

}  // namespace

int64_t plan_records(const Step& step) {
  return 1 + step.sequences + step.query_starts[step.sequences] * step.group / kLeastRows;
}

// Expensive tiles come first, so that no thread works alone at the end.
void make_plan(const Step& step, Tile* plan) {
  int64_t most = tile_rows(step);
  Tile* end = plan + 1;
  for (int64_t s = 0; s < step.sequences; s++) {
    int64_t rows = (step.query_starts[s + 1] - step.query_starts[s]) * step.group;
    for (int64_t first = 0; first < rows; first += most)
      *end++ = make_tile(step, s, first, std::min(most, rows - first));
  }
  std::stable_sort(plan + 1, end, [](const Tile& a, const Tile& b) { return cost(a) > cost(b); });
  PlanHead head{int32_t(end - plan - 1), 0, 0, 0, {}};
  for (Tile* t = plan + 1; t < end; t++) {
    t->part = head.parts;
    head.parts += int32_t(t->splits());
    head.most_splits = std::max(head.most_splits, int32_t(t->splits()));
    head.most_rows = std::max(head.most_rows, t->rows);
  }
  *reinterpret_cast<PlanHead*>(plan) = head;
}

}  // namespace modulm

using namespace modulm;

// Maximum number of 24-byte records in a plan of this step.
MODULM_API int64_t modulm_plan_records(const int32_t* query_starts, int64_t sequences,
                                       int64_t group) {
  return plan_records({query_starts, nullptr, sequences, group, 1, 0, true, nullptr});
}

MODULM_API void modulm_plan_attention(const int32_t* query_starts, const int32_t* context_lens,
                                      int64_t sequences, int64_t group, int64_t heads,
                                      int64_t window, int causal, const uint64_t* masks,
                                      void* plan) {
  make_plan({query_starts, context_lens, sequences, group, heads, window, causal != 0, masks},
            static_cast<Tile*>(plan));
}
