// Attention of each token to selected tokens of a latent cache (DeepSeek Sparse Attention, 2025).
//
// All query heads of a token see the same tokens. These are copied next to each other, split by
// split, in the layout of the cache; the rest is the attention of attention.cpp, with one sequence
// per token. Results depend neither on the number of threads nor on other rows.
#include <algorithm>

#include "attention/rows.h"
#include "attention/walk.h"
#include "base/replay.h"

namespace modulm {
namespace {

constexpr int64_t kTileHeads = 128;
enum Slots { kParts = 0, kStates = 2, kGathered = 3, kPositions = 4 };

struct Selection {
  Problem problem;  // of the whole step; its tables and lengths are not read
  StepRows rows;
  const int32_t* selected;  // [tokens, picks]; -1: none
  int64_t picks;

  int64_t tiles() const { return div_up(problem.heads, kTileHeads); }
  int64_t splits() const { return std::max<int64_t>(div_up(picks, kSplit), 1); }
};

void release_tiles() {
#if defined(__AMX_BF16__)
  tiles.release();
#endif
}

// Tokens [begin, begin + count) of a list of positions, to the beginning of a block of kSplit.
// Lines hold two elements of neighbours if `Pair`, else one.
template <class Line, bool Pair>
void gather(const Cache& c, const int32_t* table, const int32_t* positions, int64_t count,
            uint8_t* memory) {
  constexpr int half = Pair ? 4 * sizeof(Line) : 0;  // bits
  constexpr Line mask = Pair ? Line(Line(~Line{}) >> half) : Line(~Line{});
  auto to = reinterpret_cast<Line*>(memory);
  auto find = [&](int32_t position, int& shift) {
    const int64_t inside = position % c.block;
    shift = Pair && inside % 2 ? half : 0;
    return reinterpret_cast<const Line*>(c.values(table[position / c.block], 0)) +
           inside / (Pair ? 2 : 1) * c.value_size;
  };
  for (int64_t i = 0; i < count; i += Pair ? 2 : 1, to += c.value_size) {
    int low;
    const Line* first = find(positions[i], low);
    if constexpr (!Pair) {
      std::memcpy(to, first, c.value_size * sizeof(Line));
    } else if (i + 1 == count) {
      for (int64_t d = 0; d < c.value_size; d++) to[d] = Line(first[d] >> low & mask);
    } else {
      int high;
      const Line* second = find(positions[i + 1], high);
      for (int64_t d = 0; d < c.value_size; d++)
        to[d] = Line((first[d] >> low & mask) | Line(second[d] >> high << half));
    }
  }
}

void gather(const Cache& c, const int32_t* table, const int32_t* positions, int64_t count,
            uint8_t* memory) {
  if (c.dtype == kBF16) return gather<uint32_t, true>(c, table, positions, count, memory);
  if (c.paired()) return gather<uint16_t, true>(c, table, positions, count, memory);
  if (c.dtype == kF32) return gather<uint32_t, false>(c, table, positions, count, memory);
  return gather<uint16_t, false>(c, table, positions, count, memory);
}

// One token as a sequence of its own. If it sees all tokens up to itself, it reads them in place.
class TokenProblem {
 public:
  TokenProblem(const Selection& s, int64_t token) : local(s.problem), selection_(s) {
    const int64_t sequence = s.rows.sequence_of(token);
    const int64_t position = s.rows.position(sequence, token);
    const int32_t* chosen = s.selected + token * s.picks;
    table_ = s.rows.table(sequence);
    const int64_t numbers = s.picks + s.splits();
    positions_ = static_cast<int32_t*>(scratch(kPositions, numbers * int64_t(sizeof(int32_t))));
    for (int64_t i = 0; i < s.picks; i++)
      if (chosen[i] >= 0 && chosen[i] <= position) positions_[count_++] = chosen[i];
    const int64_t width = s.problem.dtype == kF32 ? 4 : 2;
    local.q = static_cast<const uint8_t*>(local.q) + token * local.q_token * width;
    local.out = static_cast<uint8_t*>(local.out) + token * local.heads * local.value_size * width;
    bounds_[0] = 0, bounds_[1] = 1, length_ = int32_t(count_);
    local.query_starts = bounds_;
    local.context_lens = &length_;
    local.sequences = 1;
    local.tables = table_;
    local.table_stride = 0;
    local.causal = false;
    local.window = 0;
    is_whole_ = count_ == position + 1;
    if (is_whole_) return;
    const Cache& c = s.problem.cache;
    memory_ = static_cast<uint8_t*>(scratch(kGathered, kSplit * c.value_size * c.element()));
    int32_t* only_block = positions_ + s.picks;  // of each split
    std::fill_n(only_block, s.splits(), 0);
    local.tables = only_block;
    local.cache.data = memory_;
    local.cache.block = kSplit;
  }
  TokenProblem(const TokenProblem&) = delete;

  Tile tile(int64_t index) const {
    const int64_t first = index * kTileHeads;
    const int64_t rows = std::min(kTileHeads, local.heads - first);
    return {0, int32_t(first), int32_t(rows), 0, int32_t(count_), 0};
  }

  // Brings the tokens of a split to where the walk reads them.
  void bring(int64_t split) {
    if (is_whole_) return;
    const int64_t begin = split * kSplit, count = std::min(count_ - begin, kSplit);
    if (count > 0)
      gather(selection_.problem.cache, table_, positions_ + begin, count, memory_);
  }

  Problem local;

 private:
  const Selection& selection_;
  const int32_t* table_;
  int32_t* positions_;
  uint8_t* memory_ = nullptr;
  int64_t count_ = 0;
  int32_t bounds_[2], length_;
  bool is_whole_;
};

// One task per token and tile of heads.
template <class Math>
void run_whole(const Selection& s, int64_t tokens) {
  parallel(tokens * s.tiles(), [&](int64_t task, int) {
    TokenProblem own(s, task / s.tiles());
    const Tile tile = own.tile(task % s.tiles());
    const int64_t rows = padded_rows(tile.rows), floats = State::floats(rows, own.local.value_size);
    auto memory = static_cast<float*>(scratch(kStates, 2 * floats * int64_t(sizeof(float))));
    State state(memory, rows, own.local.value_size);
    State part(memory + floats, rows, own.local.value_size);
    Walk<Math> walk(own.local, tile, 0);
    for (int64_t i = 0; i < std::max<int64_t>(tile.splits(), 1); i++) {
      own.bring(i);
      walk.split(i, i ? part : state);
      if (i) merge(state, part, tile.rows);
    }
    walk.deliver(state);
    release_tiles();
  });
}

// One task per token, tile of heads and split, for few tokens on many threads; then the merges.
template <class Math>
void run_split(const Selection& s, int64_t tokens) {
  const int64_t heads = std::min(kTileHeads, s.problem.heads), rows = padded_rows(heads);
  const int64_t floats = State::floats(rows, s.problem.value_size);
  const int64_t all = tokens * s.tiles();
  auto memory =
      static_cast<float*>(scratch(kParts, all * s.splits() * floats * int64_t(sizeof(float))));
  auto state = [&](int64_t task) {
    return State(memory + task * floats, rows, s.problem.value_size);
  };
  parallel(all * s.splits(), [&](int64_t task, int) {
    TokenProblem own(s, task / s.splits() / s.tiles());
    const Tile tile = own.tile(task / s.splits() % s.tiles());
    const int64_t split = task % s.splits();
    if (split >= std::max<int64_t>(tile.splits(), 1)) return;
    Walk<Math> walk(own.local, tile, 0);
    own.bring(split);
    walk.split(split, state(task));
    release_tiles();
  });
  parallel(all, [&](int64_t task, int) {
    TokenProblem own(s, task / s.tiles());
    const Tile tile = own.tile(task % s.tiles());
    State first = state(task * s.splits());
    for (int64_t i = 1; i < tile.splits(); i++)
      merge(first, state(task * s.splits() + i), tile.rows);
    Walk<Math>(own.local, tile, 0).deliver(first);
  });
}

template <class Math>
void run(const Selection& s) {
  const int64_t tokens = s.rows.tokens();
  const bool few = tokens * s.tiles() < 2 * threads();
  if (few && s.splits() > 1 && threads() > 1) run_split<Math>(s, tokens);
  else run_whole<Math>(s, tokens);
}

}  // namespace
}  // namespace modulm

using namespace modulm;

// The cache is a latent one; selected: [tokens, picks] positions in the token's sequence, without
// duplicates, -1 for none; those after the token are ignored.
MODULM_API void modulm_selected_attention(
    const void* q, int64_t q_token, int64_t q_head, int64_t heads, int64_t size,
    int64_t value_size, int dtype, void* data, int64_t kv_heads, int64_t block, int64_t padded,
    int64_t padded_value, int latent, int cache_dtype, const int32_t* tables,
    int64_t table_stride, const int32_t* query_starts, const int32_t* context_lens,
    int64_t sequences, float scale, float softcap, const float* sinks, const int32_t* selected,
    int64_t picks, void* out) {
  Problem p{q, q_token, q_head, heads, size, value_size, dtype,
            Cache{static_cast<uint8_t*>(data), kv_heads, block, padded, padded_value, cache_dtype,
                  latent != 0},
            nullptr, 0, nullptr, nullptr, 0, scale, softcap, 0, false, nullptr, sinks, nullptr,
            out};
  Selection s{p, StepRows{tables, table_stride, query_starts, context_lens, sequences}, selected,
              picks};
  if (p.cache.paired()) run<PairMath>(s);
  else run<PlainMath>(s);
}

MODULM_REPLAYABLE(selected_attention)
