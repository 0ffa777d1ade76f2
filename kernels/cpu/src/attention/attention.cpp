// Paged attention for prefill, decode and any mix: one kernel over rows of (token, query head).
//
// The query heads that share a kv head are rows of the same product. Cached tokens are cut into
// splits at fixed positions. Each split has its own softmax; they are merged in order (Milakov and
// Gimelshein, arXiv 1805.02867). Results depend neither on the number of threads nor on other rows.
#include <algorithm>
#include <vector>

#include "attention/projections.h"
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

// How tiles and kv heads become tasks: with few rows, a task has neighbouring heads, which lie next to
// each other in a block of the cache, and the tasks of a thread follow the blocks. Otherwise a task has
// one head, and tiles of one head follow each other: they share keys and values.
struct Division {
  int64_t heads = 1, groups;  // of a task; tasks that have all heads
  bool by_tile = false;

  template <class Math>
  static Division of(const Problem& p, const PlanHead& head) {
    const int64_t all = p.cache.heads;
    Division d{1, all, Walk<Math>::in_turn(p.cache, head.most_rows)};
    if (!d.by_tile) return d;
    d.heads = std::min(all, Walk<Math>::in_order(p.cache, head.most_rows)
                                ? kMostRows / head.most_rows
                                : kMostBytes / (kChunk / kPiece * p.cache.head_bytes()));
    const bool alone = is_short(head);
    const int64_t tiles = alone ? 1 : head.parts, tasks = alone ? threads() : 8 * threads();
    while (d.heads > 1 && (all % d.heads || tiles * all / d.heads < tasks)) d.heads--;
    d.heads = std::max<int64_t>(d.heads, 1);
    d.groups = all / d.heads;
    return d;
  }

  // One tile that is not split. With a task for each thread, heads that lie side by side are read one
  // after the other.
  static bool is_short(const PlanHead& head) { return head.tiles == 1 && head.most_splits <= 2; }

  // Of `count` tiles or parts of tiles.
  int64_t index(int64_t task, int64_t count) const { return by_tile ? task / groups : task % count; }
  int64_t group(int64_t task, int64_t count) const { return by_tile ? task % groups : task / count; }

 private:
  // Of a chunk of all heads. The next one is fetched meanwhile, and both are in a second-level cache.
  static constexpr int64_t kMostBytes = 288 << 10;
  // Of all heads, whose states are in a first-level cache.
  static constexpr int64_t kMostRows = 32;
};

// One task per tile and group of heads. fresh: of the only tile's tokens, to be prepared by each task
// for its heads; or null.
template <class Math>
void run_whole(const Problem& p, const Tile* tiles, const PlanHead& head, const Division& by,
               const Projections* fresh) {
  const int64_t count = head.tiles, tasks = count * by.groups;
  run_tasks_of(tasks, head.parts * by.groups, [&](int64_t task, int64_t next) {
    const Tile& tile = tiles[by.index(task, count)];
    const int64_t first_head = by.group(task, count) * by.heads;
    if (fresh) {
      const Part part{0, fresh->tokens, first_head, first_head + by.heads};
      fresh->fetch(part);
      fresh->prepare(part);
    }
    Walk<Math> walk(p, tile, first_head, by.heads);
    const int64_t rows = by.heads * padded_rows(tile.rows);
    const int64_t floats = State::floats(rows, p.value_size);
    auto memory = static_cast<float*>(scratch(2, 2 * floats * int64_t(sizeof(float))));
    State state(memory, rows, p.value_size), part(memory + floats, rows, p.value_size);
    int64_t first = tile.begin / kSplit;
    for (int64_t i = 0; i < std::max<int64_t>(tile.splits(), 1); i++) {
      const Tile& after = tiles[next < 0 ? 0 : by.index(next, count)];
      if (i + 1 < tile.splits()) walk.then(tile, first_head, first + i + 1);
      else if (next >= 0) walk.then(after, by.group(next, count) * by.heads, after.begin / kSplit);
      else walk.last();
      if (i + 1 >= tile.splits()) walk.fetch_output();
      walk.split(first + i, i ? part : state);
      if (i) merge(state, part, int(by.heads) * tile.rows);
    }
    walk.deliver(state);
    release_tiles();
  });
}

// One task per split and group of heads, for few long sequences on many threads; then the merges.
template <class Math>
void run_split(const Problem& p, const Tile* tiles, const PlanHead& head, const Division& by) {
  const int64_t rows = by.heads * padded_rows(head.most_rows);
  const int64_t floats = State::floats(rows, p.value_size), count = head.tiles, parts = head.parts;
  const int64_t tasks = parts * by.groups;
  auto memory = static_cast<float*>(scratch(0, tasks * floats * int64_t(sizeof(float))));
  auto state = [&](int64_t group, int64_t part) {
    return State(memory + (group * parts + part) * floats, rows, p.value_size);
  };
  constexpr int64_t kAhead = 4;  // states that another thread may have written
  auto tile_of = [&](int64_t part) {
    const Tile* tile = tiles + count - 1;
    while (tile->part > part) tile--;
    return tile;
  };
  auto index = [](const Tile* tile, int64_t part) {
    return tile->begin / kSplit + part - tile->part;
  };
  run_tasks_of(tasks, tasks, [&](int64_t task, int64_t next) {
    const int64_t group = by.group(task, parts), part = by.index(task, parts);
    const Tile* tile = tile_of(part);
    Walk<Math> walk(p, *tile, group * by.heads, by.heads);
    if (next >= 0) {
      const int64_t next_part = by.index(next, parts);
      const Tile* after = tile_of(next_part);
      walk.then(*after, by.group(next, parts) * by.heads, index(after, next_part));
    }
    walk.split(index(tile, part), state(group, part));
    release_tiles();
  });
  parallel(count * p.cache.heads, [&](int64_t task, int) {
    const Tile& tile = tiles[task % count];
    const int64_t kv_head = task / count, row = kv_head % by.heads * tile.rows;
    auto split = [&](int64_t i) { return state(kv_head / by.heads, tile.part + i).from(row); };
    const State first = split(0);
    for (int64_t i = 1; i < tile.splits(); i++) {
      if (i + kAhead < tile.splits()) split(i + kAhead).fetch(tile.rows);
      merge(first, split(i), tile.rows);
    }
    Walk<Math>(p, tile, kv_head).deliver(first);
  });
}

template <class Math>
void run(const Problem& p, const Tile* plan, const Projections* fresh) {
  const PlanHead& head = *reinterpret_cast<const PlanHead*>(plan);
  const Division by = Division::of<Math>(p, head);
  const bool few = head.tiles * by.groups < 4 * threads();
  const bool split = few && head.most_splits > 2 && threads() > 1;
  if (fresh && !Division::is_short(head)) {
    fresh->prepare();
    fresh = nullptr;
  }
  if (split) run_split<Math>(p, plan + 1, head, by);
  else run_whole<Math>(p, plan + 1, head, by, fresh);
}

void attend(const Problem& p, const void* plan, const Projections* fresh = nullptr) {
  std::vector<Tile> own;
  if (!plan) {
    Step step{p.query_starts, p.context_lens, p.sequences, p.group(), p.cache.heads, p.window,
              p.causal, p.masks};
    own.resize(plan_records(step));
    make_plan(step, own.data());
    plan = own.data();
  }
  if (p.cache.dtype == kInt8) run<IntegerMath>(p, static_cast<const Tile*>(plan), fresh);
  else if (p.cache.paired()) run<PairMath>(p, static_cast<const Tile*>(plan), fresh);
  else run<PlainMath>(p, static_cast<const Tile*>(plan), fresh);
}

struct Call {
  Problem problem;
  const void* plan;
};

Call call_of(const void* q, int64_t q_token, int64_t q_head, int64_t heads, int64_t size,
             int64_t value_size, int dtype, void* data, int64_t kv_heads, int64_t block,
             int64_t padded, int64_t padded_value, int latent, int cache_dtype,
             const int32_t* tables, int64_t table_stride, const int32_t* query_starts,
             const int32_t* context_lens, int64_t sequences, float scale, int64_t window,
             float softcap, const float* sinks, const float* alibi, int causal,
             const uint64_t* masks, const void* plan, void* out) {
  return {{q, q_token, q_head, heads, size, value_size, dtype,
           Cache{static_cast<uint8_t*>(data), kv_heads, block, padded, padded_value, cache_dtype,
                 latent != 0},
           tables, table_stride, query_starts, context_lens, sequences, scale, softcap, window,
           causal != 0, masks, sinks, alibi, out},
          plan};
}

// Whether they are the queries and the cache of one sequence, of which no other reads what is written,
// and attention's results are not written over projections that other heads still need.
bool one_step(const Projections& fresh, const Problem& p) {
  const int64_t width = fresh.dtype == kF32 ? 4 : 2;
  auto out = static_cast<const char*>(p.out), qkv = static_cast<const char*>(fresh.qkv);
  const bool apart = out + fresh.tokens * p.heads * p.value_size * width <= qkv ||
                     qkv + fresh.tokens * fresh.stride * width <= out;
  return p.sequences == 1 && fresh.tokens == p.query_starts[1] && fresh.q_out == p.q &&
         fresh.cache.data == p.cache.data && fresh.cache.heads == p.cache.heads &&
         fresh.q_heads == p.heads && fresh.size == p.size && fresh.dtype == p.dtype && apart;
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
  const Call call = call_of(q, q_token, q_head, heads, size, value_size, dtype, data, kv_heads, block,
                            padded, padded_value, latent, cache_dtype, tables, table_stride,
                            query_starts, context_lens, sequences, scale, window, softcap, sinks,
                            alibi, causal, masks, plan, out);
  attend(call.problem, call.plan);
}

MODULM_REPLAYABLE(paged_attention)

namespace {

// If both calls are of one sequence and a short context, each task of attention prepares its heads:
// threads meet once instead of twice, and the blocks that are written are read in the order of memory.
bool prepare_and_attend(const Slot* preparation, const Slot* attention) {
  const Projections fresh = apply(&projections, preparation);
  const Call call = apply(&call_of, attention);
  if (!one_step(fresh, call.problem)) return false;
  attend(call.problem, call.plan, &fresh);
  return true;
}

const Joined joined{modulm_replay_qkv_prepare, modulm_replay_paged_attention, prepare_and_attend};

}  // namespace
