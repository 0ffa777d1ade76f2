// Paged attention for prefill, decode and any mix: one kernel over rows of (token, query head).
//
// The query heads that share a kv head are rows of the same product. A tile is up to kRows rows of
// one sequence and kv head; it walks the cached tokens in chunks of 64 with the running maximum
// and sum of an online softmax (Milakov and Gimelshein, arXiv 1805.02867). Cached tokens are cut
// into splits at fixed positions, each with a softmax of its own, merged in order: whether splits
// run on one thread or many changes nothing, and neither do the rows beside a row.
#include <vector>

#include "attention/math.h"
#include "base/math.h"
#include "base/pool.h"
#include "base/replay.h"

namespace modulm {
namespace {

constexpr int kRows = 48;         // a multiple of 6 and 16
constexpr int kChunk = 64;        // tokens
constexpr int64_t kSplit = 512;   // tokens
constexpr float kNever = -__builtin_inff();

struct Problem {
  const void* q;
  int64_t q_token, q_head;  // strides in elements
  int64_t heads, size;
  int dtype;
  Cache cache;
  const int32_t* tables;
  int64_t table_stride;
  const int32_t* query_starts;
  const int32_t* context_lens;
  int64_t sequences;
  float scale, softcap;
  int64_t window;
  bool causal;
  const float* sinks;
  const float* alibi;
  void* out;  // [tokens, heads, size], contiguous

  int64_t group() const { return heads / cache.heads; }
  int64_t panels() const { return div_up(cache.size, kPanel); }
  int64_t state_floats() const { return kRows * (2 + panels() * kPanel); }
};

// Rows [first, first + rows) of a sequence; row i is token i / group, head i % group.
struct Tile {
  int64_t sequence, first;
  int rows;
  int64_t begin, end;  // cached tokens that some row sees
  int64_t splits() const { return div_up(end, kSplit) - begin / kSplit; }
};

// Per row: maximum score, sum of exp(score - maximum), and the values weighted by them, as
// [panel of 64 dimensions][row][64].
struct State {
  float* peak;
  float* total;
  float* values;
  explicit State(float* memory) : peak(memory), total(memory + kRows), values(memory + 2 * kRows) {}
  float* panel(int64_t p) const { return values + p * kRows * kPanel; }
};

void clear(const State& s, int64_t panels) {
  for (int r = 0; r < kRows; r++) s.peak[r] = kNever, s.total[r] = 0.0f;
  std::memset(s.values, 0, panels * kRows * kPanel * sizeof(float));
}

void scale_row(const State& s, int row, int64_t panels, float factor) {
  for (int64_t p = 0; p < panels; p++) {
    float* to = s.panel(p) + row * kPanel;
    for (int c = 0; c < kPanel; c += kLanes) store(to + c, load(to + c) * factor);
  }
}

// exp(a - b) where a <= b; 1 if they are equal, -infinity included.
float decay(float a, float b) { return a == b ? 1.0f : vexp(splat(a - b))[0]; }

void merge(const State& into, const State& from, int rows, int64_t panels) {
  for (int r = 0; r < rows; r++) {
    float peak = into.peak[r] > from.peak[r] ? into.peak[r] : from.peak[r];
    float mine = decay(into.peak[r], peak), theirs = decay(from.peak[r], peak);
    into.peak[r] = peak;
    into.total[r] = into.total[r] * mine + from.total[r] * theirs;
    for (int64_t p = 0; p < panels; p++) {
      float* to = into.panel(p) + r * kPanel;
      const float* add = from.panel(p) + r * kPanel;
      for (int c = 0; c < kPanel; c += kLanes)
        store(to + c, load(to + c) * mine + load(add + c) * theirs);
    }
  }
}

template <class Math>
class Walk {
 public:
  using Element = typename Math::Element;
  using Line = typename Math::Line;

  Walk(const Problem& p, const Tile& tile, int64_t head) : p(p), tile(tile), head(head) {
    int64_t size = p.cache.size, piece = kChunk * size;
    int64_t bytes = kRows * size * sizeof(Element) + kRows * kChunk * (sizeof(Element) + 4) +
                    2 * piece * sizeof(Line);
    auto memory = static_cast<char*>(scratch(1, bytes));
    auto take = [&](int64_t n) {
      char* at = memory;
      memory += n;
      return at;
    };
    scores = reinterpret_cast<float*>(take(kRows * kChunk * sizeof(float)));
    weights = reinterpret_cast<Element*>(take(kRows * kChunk * sizeof(Element)));
    queries = reinterpret_cast<Element*>(take(kRows * size * sizeof(Element)));
    buffer = reinterpret_cast<Line*>(take(piece * sizeof(Line)));
    start = p.query_starts[tile.sequence];
    length = p.context_lens[tile.sequence];
    base = length - (p.query_starts[tile.sequence + 1] - start);
    with_float(p.dtype, [&](auto t) { load_queries(static_cast<const decltype(t)*>(p.q)); });
  }

  // The softmax of one split, from scratch.
  void split(int64_t index, const State& state) {
    clear(state, p.panels());
    int64_t from = index * kSplit, to = from + kSplit;
    if (to > tile.end) to = tile.end;
    int64_t chunk = from < tile.begin ? tile.begin / kChunk * kChunk : from;
    for (; chunk < to; chunk += kChunk) {
      int64_t stop = chunk + kChunk < to ? chunk + kChunk : to;
      add_scores(chunk, stop);
      for (int r = 0; r < tile.rows; r++) soften(r, chunk, state);
      add_values(chunk, stop, state);
    }
  }

  void deliver(const State& state) {
    with_float(p.dtype, [&](auto t) {
      using T = decltype(t);
      for (int r = 0; r < tile.rows; r++) {
        int64_t h = query_head(r);
        float factor = 1.0f;
        if (p.sinks) {
          float peak = state.peak[r] > p.sinks[h] ? state.peak[r] : p.sinks[h];
          factor = decay(state.peak[r], peak);
          state.total[r] = state.total[r] * factor + decay(p.sinks[h], peak);
        }
        factor = state.total[r] == 0.0f ? 0.0f : factor / state.total[r];
        T* to = static_cast<T*>(p.out) + ((start + token(r)) * p.heads + h) * p.size;
        for_lanes(p.size, [&](int64_t i, int n) {
          vf y = load(state.panel(i / kPanel) + r * kPanel + i % kPanel);
          store_n(to + i, y * factor, n);
        });
      }
    });
  }

 private:
  int64_t token(int r) const { return (tile.first + r) / p.group(); }
  int64_t query_head(int r) const { return head * p.group() + (tile.first + r) % p.group(); }

  template <class T>
  void load_queries(const T* q) {
    for (int r = 0; r < tile.rows; r++) {
      const T* from = q + (start + token(r)) * p.q_token + query_head(r) * p.q_head;
      Element* to = queries + r * p.cache.size;
      for_lanes(p.size, [&](int64_t i, int n) { store_n(to + i, load_n(from + i, n), n); });
      std::memset(to + p.size, 0, (p.cache.size - p.size) * sizeof(Element));
    }
  }

  // f(block id, offset in the block, tokens, offset in the chunk) over [chunk, stop), in pieces
  // that lie in one block; they start and end at multiples of 32.
  template <class F>
  void pieces(int64_t chunk, int64_t stop, F&& f) const {
    const int32_t* table = p.tables + tile.sequence * p.table_stride;
    stop = div_up(stop, 32) * 32;
    for (int64_t at = chunk; at < stop;) {
      int64_t inside = at % p.cache.block, left = p.cache.block - inside;
      int64_t count = stop - at < left ? stop - at : left;
      f(int64_t(table[at / p.cache.block]), inside, count, at - chunk);
      at += count;
    }
  }

  void add_scores(int64_t chunk, int64_t stop) {
    std::memset(scores, 0, tile.rows * kChunk * sizeof(float));
    pieces(chunk, stop, [&](int64_t id, int64_t inside, int64_t count, int64_t at) {
      auto keys = Math::keys(p.cache, id, head, inside, count, buffer);
      Math::product(tile.rows, queries, p.cache.size, keys, int(count), p.cache.size, scores + at);
    });
  }

  void add_values(int64_t chunk, int64_t stop, const State& state) {
    pieces(chunk, stop, [&](int64_t id, int64_t inside, int64_t count, int64_t at) {
      auto values =
          Math::values(p.cache, id, head, inside, count, length - (chunk + at), buffer);
      for (int64_t d = 0; d < p.cache.size; d += kPanel) {
        int width = int(p.cache.size - d < kPanel ? p.cache.size - d : kPanel);
        Math::product(tile.rows, weights + at, kChunk, {values.data + d, values.stride}, width,
                      count, state.panel(d / kPanel));
      }
    });
  }

  // Which of the chunk's 64 tokens row r sees: [first, last).
  void bounds(int r, int64_t chunk, int64_t& first, int64_t& last) const {
    int64_t position = base + token(r);
    last = (p.causal ? position + 1 : length) - chunk;
    first = 0;
    if (p.window > 0) {
      first = position - p.window + 1 - chunk;
      if (position + p.window - chunk < last) last = position + p.window - chunk;
    }
    if (first < 0) first = 0;
    if (last > kChunk) last = kChunk;
  }

  // Scores of row r to weights, in place of the running maximum and sum.
  void soften(int r, int64_t chunk, const State& state) {
    constexpr int vectors = kChunk / kLanes;
    Element* to = weights + r * kChunk;
    int64_t first, last;
    bounds(r, chunk, first, last);
    if (first >= last) {
      std::memset(to, 0, kChunk * sizeof(Element));
      return;
    }
    vf x[vectors], peak = splat(kNever);
    for (int v = 0; v < vectors; v++) {
      x[v] = load(scores + r * kChunk + v * kLanes) * p.scale;
      if (p.softcap > 0) x[v] = vtanh(x[v] / p.softcap) * p.softcap;
    }
    if (p.alibi || first > 0 || last < kChunk) restrict_lanes(r, chunk, first, last, x);
    for (int v = 0; v < vectors; v++) peak = vmax(peak, x[v]);
    float before = state.peak[r], now = largest(peak);
    if (before > now) now = before;
    if (now != before) {
      float factor = decay(before, now);
      state.peak[r] = now;
      state.total[r] *= factor;
      if (before != kNever) scale_row(state, r, p.panels(), factor);
    }
    vf total{};
    for (int v = 0; v < vectors; v++) {
      vf weight = vexp(x[v] - now);
      total += weight;
      store(to + v * kLanes, weight);
    }
    state.total[r] += sum(total);
  }

  void restrict_lanes(int r, int64_t chunk, int64_t first, int64_t last, vf* x) const {
    vi lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    float slope = p.alibi ? p.alibi[query_head(r)] : 0.0f;
    int32_t distance = int32_t(base + token(r) - chunk);
    for (int v = 0; v < kChunk / kLanes; v++) {
      vi at = lane + v * kLanes;
      if (p.alibi) x[v] -= __builtin_convertvector(distance - at, vf) * slope;
      x[v] = choose((at >= int32_t(first)) & (at < int32_t(last)), x[v], splat(kNever));
    }
  }

  const Problem& p;
  const Tile& tile;
  int64_t head, start, length, base;  // base: position of the sequence's first new token
  float* scores;      // [rows][64]
  Element* weights;   // [rows][64]
  Element* queries;   // [rows][size]
  Line* buffer;       // a converted piece of the cache
};

std::vector<Tile> cut(const Problem& p) {
  std::vector<Tile> tiles;
  for (int64_t s = 0; s < p.sequences; s++) {
    int64_t tokens = p.query_starts[s + 1] - p.query_starts[s], rows = tokens * p.group();
    int64_t length = p.context_lens[s], base = length - tokens;
    for (int64_t first = 0; first < rows; first += kRows) {
      int count = int(rows - first < kRows ? rows - first : kRows);
      int64_t low = base + first / p.group(), high = base + (first + count - 1) / p.group();
      int64_t begin = p.window > 0 && low - p.window + 1 > 0 ? low - p.window + 1 : 0;
      int64_t end = p.causal ? high + 1 : length;
      if (p.window > 0 && high + p.window < end) end = high + p.window;
      tiles.push_back({s, first, count, begin, end});
    }
  }
  return tiles;
}

void release_tiles() {
#if defined(__AMX_BF16__)
  tiles.release();
#endif
}

// One task per tile and kv head.
template <class Math>
void run_whole(const Problem& p, const std::vector<Tile>& tiles) {
  parallel(int64_t(tiles.size()) * p.cache.heads, [&](int64_t task, int) {
    const Tile& tile = tiles[task / p.cache.heads];
    Walk<Math> walk(p, tile, task % p.cache.heads);
    auto memory = static_cast<float*>(scratch(2, 2 * p.state_floats() * sizeof(float)));
    State state(memory), part(memory + p.state_floats());
    int64_t first = tile.begin / kSplit;
    walk.split(first, state);
    for (int64_t i = 1; i < tile.splits(); i++) {
      walk.split(first + i, part);
      merge(state, part, tile.rows, p.panels());
    }
    walk.deliver(state);
    release_tiles();
  });
}

// One task per split, for few long sequences on many threads; then the merges.
template <class Math>
void run_split(const Problem& p, const std::vector<Tile>& tiles) {
  struct Part {
    int64_t tile, split;
  };
  std::vector<Part> parts;
  std::vector<int64_t> first_part;
  for (size_t t = 0; t < tiles.size(); t++) {
    first_part.push_back(int64_t(parts.size()));
    for (int64_t i = 0; i < tiles[t].splits(); i++) parts.push_back({int64_t(t), i});
  }
  int64_t floats = p.state_floats(), heads = p.cache.heads;
  auto memory = static_cast<float*>(scratch(0, parts.size() * heads * floats * sizeof(float)));
  parallel(int64_t(parts.size()) * heads, [&](int64_t task, int) {
    const Part& part = parts[task / heads];
    const Tile& tile = tiles[part.tile];
    Walk<Math> walk(p, tile, task % heads);
    walk.split(tile.begin / kSplit + part.split, State(memory + task * floats));
    release_tiles();
  });
  parallel(int64_t(tiles.size()) * heads, [&](int64_t task, int) {
    const Tile& tile = tiles[task / heads];
    int64_t head = task % heads, first = first_part[task / heads];
    State state(memory + (first * heads + head) * floats);
    for (int64_t i = 1; i < tile.splits(); i++)
      merge(state, State(memory + ((first + i) * heads + head) * floats), tile.rows, p.panels());
    Walk<Math>(p, tile, head).deliver(state);
  });
}

template <class Math>
void run(const Problem& p) {
  std::vector<Tile> tiles = cut(p);
  int64_t longest = 0;
  for (const Tile& tile : tiles) longest = longest < tile.splits() ? tile.splits() : longest;
  bool few = int64_t(tiles.size()) * p.cache.heads < 4 * threads();
  if (few && longest > 2 && threads() > 1) run_split<Math>(p, tiles);
  else run_whole<Math>(p, tiles);
}

}  // namespace
}  // namespace modulm

using namespace modulm;

MODULM_API void modulm_paged_attention(
    const void* q, int64_t q_token, int64_t q_head, int64_t heads, int64_t size, int dtype,
    void* data, int64_t kv_heads, int64_t block, int64_t padded, int cache_dtype,
    const int32_t* tables, int64_t table_stride, const int32_t* query_starts,
    const int32_t* context_lens, int64_t sequences, float scale, int64_t window, float softcap,
    const float* sinks, const float* alibi, int causal, void* out) {
  Problem p{q, q_token, q_head, heads, size, dtype,
            Cache{static_cast<uint8_t*>(data), kv_heads, block, padded, cache_dtype},
            tables, table_stride, query_starts, context_lens, sequences, scale, softcap, window,
            causal != 0, sinks, alibi, out};
  if (p.cache.paired()) run<PairMath>(p);
  else run<PlainMath>(p);
}

MODULM_REPLAYABLE(paged_attention)
