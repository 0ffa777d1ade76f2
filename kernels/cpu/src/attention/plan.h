// How the work of one step is cut up, the same for all layers of a kind.
#pragma once

#include "base/types.h"

namespace modulm {

constexpr int64_t kSplit = 512;  // cached tokens with a softmax of their own

// Rows [first, first + rows) of a sequence and a kv head; row i is token i / group, query head
// i % group. [begin, end) are the cached tokens that some row sees; `part` counts the splits of
// the tiles before it.
struct Tile {
  int32_t sequence, first, rows, begin, end, part;
  int64_t splits() const { return div_up(end, kSplit) - begin / kSplit; }
};

// What precedes the tiles of a plan, in as many bytes as one of them.
struct PlanHead {
  int32_t tiles, parts, most_splits, most_rows, unused[2];
};

struct Step {
  const int32_t* query_starts;
  const int32_t* context_lens;
  int64_t sequences, group, heads;  // heads: kv heads
  int64_t window;
  bool causal;
};

// Records that make_plan may write, the head included.
int64_t plan_records(const Step& step);
void make_plan(const Step& step, Tile* plan);

}  // namespace modulm
