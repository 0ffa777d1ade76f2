// The indexer of sparse attention (DeepSeek Sparse Attention, 2025): the cached tokens with the
// largest sums over heads of weight * max(0, scale * q . k).
//
// The cache is a latent one (attention/cache.h): a vector per token, and no value. Scores of some
// tokens of the step are computed first, tile by tile; then each token selects among its own.
// Results depend neither on the number of threads nor on other rows.
#include <algorithm>
#include <vector>

#include "attention/math.h"
#include "attention/rows.h"
#include "base/pool.h"
#include "base/replay.h"

namespace modulm {
namespace {

constexpr int64_t kTileTokens = 4;        // tokens that share the conversion of a piece of keys
constexpr int64_t kRunKeys = 1024;        // keys of a task
constexpr int64_t kScoreBytes = 32 << 20;  // of the scores that exist at a time
enum Slots { kScores = 3, kWork = 4, kKeys = 5 };

struct Indexer {
  const void* q;
  int64_t q_token, q_head, heads, size;
  int dtype;
  Cache cache;
  StepRows rows;
  float scale;
  const float* weights;  // [tokens, heads]
  int64_t picks;
  int32_t* out;  // [tokens, picks]

  int64_t columns() const { return div_up(heads, 16) * 16; }  // of one token
};

// Consecutive tokens of a sequence.
struct ScoreTile {
  int64_t sequence, first, tokens, keys;  // keys: what the last token sees
};

void release_tiles() {
#if defined(__AMX_BF16__)
  tiles.release();
#endif
}

// Splits memory of one buffer into arrays, each aligned.
class Arena {
 public:
  explicit Arena(char* memory) : memory_(memory) {}
  template <class T>
  T* take(int64_t count) {
    auto taken = reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += div_up(count * int64_t(sizeof(T)), 64) * 64;
    return taken;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

// One tile of tokens against a run of keys. Keys are the rows of the product and the queries of
// all heads its columns, so that each key's sum over heads is a sum along its row.
template <class Math>
class Scorer {
 public:
  using Element = typename Math::Element;
  using Line = typename Math::Line;

  Scorer(const Indexer& x, const ScoreTile& tile)
      : x(x), tile(tile), lines(x.cache.size / Math::width), width(tile.tokens * x.columns()) {
    for (bool measure : {true, false}) {
      Arena memory(measure ? nullptr : static_cast<char*>(scratch(kWork, bytes)));
      turned = memory.take<Line>(lines * width);
      weights = memory.take<float>(width);
      row = memory.take<Element>(x.cache.size);
      keys = memory.take<Element>(kPiece * x.cache.size);
      sums = memory.take<float>(kPiece * (width + 16));
      converted = memory.take<Line>(kPiece / Math::width * x.cache.value_size);
      bytes = memory.bytes();
    }
    std::memset(turned, 0, lines * width * sizeof(Line));
    std::memset(weights, 0, width * sizeof(float));
    with_float(x.dtype, [&](auto t) { turn(static_cast<const decltype(t)*>(x.q)); });
  }

  // scores: of the tile's tokens, `stride` apart.
  void run(int64_t begin, int64_t end, float* scores, int64_t stride) {
    const int32_t* table = x.rows.table(tile.sequence);
    auto at = [&](int, int c) { return turned + c; };
    for (int64_t key = begin; key < end; key += kPiece) {
      const int64_t id = table[key / x.cache.block], inside = key % x.cache.block;
      const Line* piece = converted;
      if (Math::in_place(x.cache))
        piece = reinterpret_cast<const Line*>(x.cache.values(id, 0)) +
                inside / Math::width * x.cache.value_size;
      else Math::values(x.cache, id, 0, inside, converted);
      Math::rows(piece, x.cache.size, keys);
      multiply_attention(Left<Element>{keys, x.cache.size, kPiece}, at, int(width),
                         Depth{1, lines, width}, Sums{sums, width + 16, true});
      for (int64_t t = 0; t < tile.tokens; t++)
        add_heads(t, int(std::min<int64_t>(kPiece, end - key)), scores + t * stride + key);
    }
  }

 private:
  template <class T>
  void turn(const T* q) {
    for (int64_t t = 0; t < tile.tokens; t++)
      for (int64_t h = 0; h < x.heads; h++) {
        const T* from = q + (tile.first + t) * x.q_token + h * x.q_head;
        for_lanes(x.size, [&](int64_t i, int n) { store_n(row + i, load_n(from + i, n), n); });
        std::memset(row + x.size, 0, (x.cache.size - x.size) * sizeof(Element));
        Line* to = turned + t * x.columns() + h;
        for (int64_t i = 0; i < lines; i++) to[i * width] = load_raw<Line>(row + i * Math::width);
        weights[t * x.columns() + h] = x.weights[(tile.first + t) * x.heads + h];
      }
  }

  void add_heads(int64_t token, int count, float* to) const {
    const int64_t first = token * x.columns();
    for (int key = 0; key < count; key++) {
      const float* from = sums + key * (width + 16) + first;
      vf total{};
      for (int64_t h = 0; h < x.columns(); h += kLanes)
        total += vmax(load(from + h) * x.scale, vf{}) * load(weights + first + h);
      to[key] = sum(total);
    }
  }

  const Indexer& x;
  const ScoreTile& tile;
  int64_t lines, width, bytes = 0;
  Line *turned, *converted;  // [lines][width]; a piece of keys
  float *weights, *sums;     // [width]; [32 keys][width]
  Element *row, *keys;       // a query; [32][size]
};

// A number in the order of floats.
inline uint32_t ordered(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Writes the positions of the `count` < n largest scores in ascending order, of equal ones the
// first. The digits of the smallest of them are found one after the other.
void select(const float* scores, int64_t n, int64_t count, int32_t* to) {
  constexpr int kBits = 11;
  auto keys = static_cast<uint32_t*>(scratch(kKeys, n * int64_t(sizeof(uint32_t))));
  for (int64_t i = 0; i < n; i++) keys[i] = ordered(scores[i]);
  uint32_t least = 0, known = 0;
  int64_t left = count;  // to be taken of those that have the digits found so far
  for (int shift : {21, 10, 0}) {
    const uint32_t digit = (shift ? (1u << kBits) : 1u << 10) - 1;
    int32_t counts[1 << kBits] = {};
    for (int64_t i = 0; i < n; i++)
      if ((keys[i] & known) == least) counts[keys[i] >> shift & digit]++;
    uint32_t found = digit;
    while (counts[found] < left) left -= counts[found--];
    least |= found << shift;
    known |= digit << shift;
  }
  for (int64_t i = 0; i < n; i++) {
    if (keys[i] < least || (keys[i] == least && left-- <= 0)) continue;
    *to++ = int32_t(i);
  }
}

void select_of(const Indexer& x, int64_t token, const float* scores) {
  const int64_t sequence = x.rows.sequence_of(token);
  const int64_t seen = x.rows.position(sequence, token) + 1, count = std::min(seen, x.picks);
  int32_t* to = x.out + token * x.picks;
  std::fill_n(to, x.picks - count, -1);
  to += x.picks - count;
  if (count < seen) return select(scores, seen, count, to);
  for (int64_t i = 0; i < count; i++) to[i] = int32_t(i);
}

// Tokens [first, end): their scores, then their selections. scores: [tokens][stride].
template <class Math>
void run_some(const Indexer& x, int64_t first, int64_t end, float* scores, int64_t stride) {
  struct Run {
    int64_t tile, begin;
  };
  std::vector<ScoreTile> tiles;
  std::vector<Run> runs;
  for (int64_t token = first; token < end;) {
    const int64_t sequence = x.rows.sequence_of(token);
    const int64_t last =
        std::min({end, token + kTileTokens, int64_t(x.rows.query_starts[sequence + 1])});
    const int64_t keys = x.rows.position(sequence, last - 1) + 1;
    if (keys > x.picks) {
      for (int64_t begin = 0; begin < keys; begin += kRunKeys)
        runs.push_back({int64_t(tiles.size()), begin});
      tiles.push_back({sequence, token, last - token, keys});
    }
    token = last;
  }
  parallel(int64_t(runs.size()), [&](int64_t i, int) {
    const ScoreTile& tile = tiles[runs[i].tile];
    Scorer<Math> scorer(x, tile);
    scorer.run(runs[i].begin, std::min(runs[i].begin + kRunKeys, tile.keys),
               scores + (tile.first - first) * stride, stride);
    release_tiles();
  });
  parallel(end - first, [&](int64_t i, int) { select_of(x, first + i, scores + i * stride); });
}

template <class Math>
void run(const Indexer& x) {
  int64_t longest = 0;
  for (int64_t s = 0; s < x.rows.sequences; s++)
    longest = std::max<int64_t>(longest, x.rows.context_lens[s]);
  const int64_t stride = longest > x.picks ? div_up(longest, kPiece) * kPiece : 0;
  const int64_t tokens = x.rows.tokens();
  int64_t some = stride ? kScoreBytes / (stride * int64_t(sizeof(float))) : tokens;
  some = std::max(some / kTileTokens, int64_t(threads())) * kTileTokens;
  some = std::min(some, tokens);
  auto scores = static_cast<float*>(scratch(kScores, some * stride * int64_t(sizeof(float))));
  for (int64_t first = 0; first < tokens; first += some)
    run_some<Math>(x, first, std::min(first + some, tokens), scores, stride);
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// q: [tokens, heads, size]; weights: [tokens, heads]; out: [tokens, picks], positions in ascending
// order after as many -1 as the token has too few predecessors. The cache is a latent one.
MODULM_API void modulm_pick_tokens(
    const void* q, int64_t q_token, int64_t q_head, int64_t heads, int64_t size, int dtype,
    void* data, int64_t kv_heads, int64_t block, int64_t padded, int64_t padded_value, int latent,
    int cache_dtype, const int32_t* tables, int64_t table_stride, const int32_t* query_starts,
    const int32_t* context_lens, int64_t sequences, float scale, const float* weights,
    int64_t picks, int32_t* out) {
  Indexer x{q, q_token, q_head, heads, size, dtype,
            Cache{static_cast<uint8_t*>(data), kv_heads, block, padded, padded_value, cache_dtype,
                  latent != 0},
            StepRows{tables, table_stride, query_starts, context_lens, sequences}, scale, weights,
            picks, out};
  if (x.cache.paired()) run<PairMath>(x);
  else run<PlainMath>(x);
}

MODULM_REPLAYABLE(pick_tokens)
