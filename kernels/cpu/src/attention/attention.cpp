// Paged attention for prefill, decode and any mix: one kernel over rows of (token, query head).
//
// The query heads that share a kv head are rows of the same product. Cached tokens are cut into
// splits at fixed positions. Each split has its own softmax; they are merged in order (Milakov and
// Gimelshein, arXiv 1805.02867). Results depend neither on the number of threads nor on other rows.
#include <algorithm>
#include <vector>

#include "attention/walk.h"
#include "base/replay.h"

namespace modulm {
namespace {

void release_tiles() {
#if defined(__AMX_BF16__)
  tiles.release();
#endif
}

// If there are many tasks, each thread gets consecutive ones: f(task, next), where next is the
// thread's next task or -1.
template <class F>
void run_tasks_of(int64_t tasks, int64_t splits, F&& f) {
  if (splits < 8 * threads()) return parallel(tasks, [&](int64_t task, int) { f(task, -1); });
  parallel_near(tasks, [&](int64_t task) { f(task, task + 1 < tasks ? task + 1 : -1); });
}

// One task per tile and kv head. Tiles of one head follow each other: they share keys and values.
template <class Math>
void run_whole(const Problem& p, const Tile* tiles, const PlanHead& head) {
  const int64_t count = head.tiles, heads = p.cache.heads;
  run_tasks_of(count * heads, head.parts * heads, [&](int64_t task, int64_t next) {
    const Tile& tile = tiles[task % count];
    Walk<Math> walk(p, tile, task / count);
    int64_t rows = padded_rows(tile.rows), floats = State::floats(rows, p.value_size);
    auto memory = static_cast<float*>(scratch(2, 2 * floats * int64_t(sizeof(float))));
    State state(memory, rows, p.value_size), part(memory + floats, rows, p.value_size);
    int64_t first = tile.begin / kSplit;
    for (int64_t i = 0; i < std::max<int64_t>(tile.splits(), 1); i++) {
      const Tile& after = tiles[next < 0 ? 0 : next % count];
      if (i + 1 < tile.splits()) walk.then(tile, task / count, first + i + 1);
      else if (next >= 0) walk.then(after, next / count, after.begin / kSplit);
      else walk.last();
      walk.split(first + i, i ? part : state);
      if (i) merge(state, part, tile.rows);
    }
    walk.deliver(state);
    release_tiles();
  });
}

// One task per split, for few long sequences on many threads; then the merges.
template <class Math>
void run_split(const Problem& p, const Tile* tiles, const PlanHead& head) {
  int64_t rows = padded_rows(head.most_rows), floats = State::floats(rows, p.value_size);
  int64_t count = head.tiles;
  auto memory = static_cast<float*>(
      scratch(0, head.parts * p.cache.heads * floats * int64_t(sizeof(float))));
  auto state = [&](int64_t kv_head, int64_t part) {
    return State(memory + (kv_head * head.parts + part) * floats, rows, p.value_size);
  };
  auto tile_of = [&](int64_t part) {
    const Tile* tile = tiles + count - 1;
    while (tile->part > part) tile--;
    return tile;
  };
  auto index = [](const Tile* tile, int64_t part) {
    return tile->begin / kSplit + part - tile->part;
  };
  const int64_t tasks = head.parts * p.cache.heads;
  run_tasks_of(tasks, tasks, [&](int64_t task, int64_t next) {
    int64_t kv_head = task / head.parts, part = task % head.parts;
    const Tile* tile = tile_of(part);
    Walk<Math> walk(p, *tile, kv_head);
    if (next >= 0) {
      const Tile* after = tile_of(next % head.parts);
      walk.then(*after, next / head.parts, index(after, next % head.parts));
    }
    walk.split(index(tile, part), state(kv_head, part));
    release_tiles();
  });
  parallel(count * p.cache.heads, [&](int64_t task, int) {
    const Tile& tile = tiles[task % count];
    int64_t kv_head = task / count;
    State first = state(kv_head, tile.part);
    for (int64_t i = 1; i < tile.splits(); i++)
      merge(first, state(kv_head, tile.part + i), tile.rows);
    Walk<Math>(p, tile, kv_head).deliver(first);
  });
}

template <class Math>
void run(const Problem& p, const Tile* plan) {
  const PlanHead& head = *reinterpret_cast<const PlanHead*>(plan);
  bool few = head.tiles * p.cache.heads < 4 * threads();
  if (few && head.most_splits > 2 && threads() > 1) run_split<Math>(p, plan + 1, head);
  else run_whole<Math>(p, plan + 1, head);
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// plan: what modulm_plan_attention made for these sequences, or null. A latent cache has kv_heads
// 1 and `padded` equal to `padded_value`.
MODULM_API void modulm_paged_attention(
    const void* q, int64_t q_token, int64_t q_head, int64_t heads, int64_t size,
    int64_t value_size, int dtype, void* data, int64_t kv_heads, int64_t block, int64_t padded,
    int64_t padded_value, int latent, int cache_dtype, const int32_t* tables,
    int64_t table_stride, const int32_t* query_starts, const int32_t* context_lens,
    int64_t sequences, float scale, int64_t window, float softcap, const float* sinks,
    const float* alibi, int causal, const uint64_t* masks, const void* plan, void* out) {
  Problem p{q, q_token, q_head, heads, size, value_size, dtype,
            Cache{static_cast<uint8_t*>(data), kv_heads, block, padded, padded_value, cache_dtype,
                  latent != 0},
            tables, table_stride, query_starts, context_lens, sequences, scale, softcap, window,
            causal != 0, masks, sinks, alibi, out};
  std::vector<Tile> own;
  if (!plan) {
    Step step{query_starts, context_lens, sequences, p.group(), kv_heads, window, causal != 0,
              masks};
    own.resize(plan_records(step));
    make_plan(step, own.data());
    plan = own.data();
  }
  if (p.cache.dtype == kInt8) run<IntegerMath>(p, static_cast<const Tile*>(plan));
  else if (p.cache.paired()) run<PairMath>(p, static_cast<const Tile*>(plan));
  else run<PlainMath>(p, static_cast<const Tile*>(plan));
}

MODULM_REPLAYABLE(paged_attention)
