// How the work of one step is divided; the same for all layers of a kind.
#pragma once

#include "base/types.h"

namespace modulm {

constexpr int64_t kSplit = 512;  // cached tokens per split, each with its own softmax

// Rows [first, first + rows) of a sequence and a kv head; row i is token i / group, query head i %
// group. [begin, end) are the cached tokens that any of the rows sees; `part` is the number of
// splits of earlier tiles.
struct Tile {
  int32_t sequence, first, rows, begin, end, part;
  int64_t splits() const { return div_up(end, kSplit) - begin / kSplit; }
};

// The head of a plan, before its tiles; as large as a tile.
struct PlanHead {
  int32_t tiles, parts, most_splits, most_rows, unused[2];
};

struct Step {
  const int32_t* query_starts;
  const int32_t* context_lens;
  int64_t sequences, group, heads;  // heads: kv heads
  int64_t window;
  bool causal;
  const uint64_t* masks;  // as in Problem
};

// Maximum number of records that make_plan writes, including the head.
int64_t plan_records(const Step& step);
void make_plan(const Step& step, Tile* plan);

}  // namespace modulm
