// One tile of rows over one split of cached tokens: scores, softmax, weighted values. A few rows do so
// for several kv heads, chunk by chunk.
#pragma once

#include <algorithm>

#include "attention/direct.h"
#include "attention/direct_fixed.h"
#include "attention/math.h"
#include "attention/plan.h"
#include "attention/problem.h"
#include "attention/softmax.h"
#include "attention/state.h"
#include "attention/transpose.h"
#include "base/pool.h"

namespace modulm {

// The constructor, `split` and `deliver` are compiled once, in walk.cpp. With more than one head, rows
// are `Walk::in_turn`, and a state has the rows of all heads one after the other.
template <class Math>
class Walk {
 public:
  using Element = typename Math::Element;
  using Weight = typename Math::Weight;
  using Line = typename Math::Line;

  Walk(const Problem& p, const Tile& tile, int64_t head, int64_t heads = 1);

  // The softmax of one split, from scratch.
  void split(int64_t index, const State& state);

  // Sets the split that this thread computes next. With few rows, memory is the bottleneck: the
  // first chunk of that split is prefetched meanwhile. With many rows, its queries are worth
  // prefetching.
  void then(const Tile& tile, int64_t head, int64_t index) {
    ahead = {};
    if (this->tile.rows > kFewRows) {
      if (&tile != &this->tile) coming_queries = queries_of(tile, head);
      return;
    }
    if (p.cache.latent) return;
    Span first = first_chunk(pieces(tile, index));
    ahead = {&tile, head, index * kSplit + first.low, (first.high - first.low) / kPiece};
  }

  // Whether the next chunk of up to `rows` rows is fetched in the order of memory: where blocks have
  // as many tokens as pieces, the keys, values and scales of a piece are contiguous, and so are
  // those of the next head.
  static bool in_turn(const Cache& cache, int64_t rows) {
    return kFetchedInTurn && cache.block == kPiece && !cache.latent && rows <= kFewRows;
  }

  // Whether such rows are multiplied piece by piece, as these lie in memory, and nothing is fetched.
  static bool in_order(const Cache& cache, int64_t rows) {
    return !kFixed && in_turn(cache, rows) && Math::in_place(cache) && rows <= 2;
  }

  void last() { ahead = {}; }

  // Prefetches the memory of the results of many rows during its last split.
  void fetch_output() {
    if (tile.rows <= kFewRows) return;
    const int64_t width = p.dtype == kF32 ? 4 : 2, row = p.heads * p.value_size * width;
    auto out = static_cast<const uint8_t*>(p.out) + head * p.group() * p.value_size * width;
    coming_results = {out + (start + token(0)) * row, row, p.group() * p.value_size * width,
                      token(tile.rows - 1) - token(0) + 1, calls()};
  }

  // Writes the result of all splits, divided by their sums of weights.
  void deliver(const State& states);

 private:
  // Rows that share the bounds of their visible tokens, and one set of tiles.
#if defined(__AMX_BF16__)
  static constexpr int kGroupRows = 32;
#else
  static constexpr int kGroupRows = 4 * kPairRows;
#endif
  static constexpr int64_t kWeightStride = kChunk + 64 / sizeof(Weight);
  static constexpr int kPlanes = Math::planes;
  static constexpr bool kFixed = Math::fixed;

  static constexpr int kFewRows = 16;
  // Lines that are asked for before what does not fetch: finding pieces, the softmax.
  static constexpr int kBurst = 24;
  static constexpr int kRowBurst = 16;  // beside a row's integers that become floats, and back
  static constexpr float kHidden = -1e30f;
  static constexpr float kLarge = 4096.0f;  // sum of weights at which they are rescaled

  struct Span {
    int64_t low, high;  // columns of the split, multiples of 32
  };

  // A chunk whose keys and values are prefetched: pieces from a position on.
  struct Ahead {
    const Tile* tile;
    int64_t head, position, pieces;
  };

  // The columns of a split that some row of a tile sees, rounded to pieces.
  static Span pieces(const Tile& tile, int64_t index) {
    const int64_t origin = index * kSplit;
    return {std::max<int64_t>(tile.begin - origin, 0) / kPiece * kPiece,
            div_up(std::min<int64_t>(tile.end - origin, kSplit), kPiece) * kPiece};
  }

  // The columns after `seen` up to the next multiple of kChunk.
  static Span first_chunk(Span seen) {
    return {seen.low, std::min(seen.low / kChunk * kChunk + kChunk, seen.high)};
  }

  // Whether the keys and values of a split are located and converted for all groups at once.
  bool at_once() const { return p.cache.latent || tile.rows > kGroupRows; }
  int64_t score_stride() const { return (p.cache.latent ? kSplit : kChunk) + 16; }
  int64_t score_rows() const { return p.cache.latent ? padded : padded_rows(kGroupRows); }
  int group_rows() const { return std::min(kGroupRows, tile.rows - group); }
  int64_t token(int r) const { return (tile.first + r) / p.group(); }
  int64_t query_head(int r) const { return head * p.group() + (tile.first + r) % p.group(); }
  int64_t query_columns() const { return div_up(tile.rows, 16) * 16; }
  int64_t sum_stride() const { return std::max<int64_t>(kChunk, p.cache.value_size) + 16; }

  template <class T>
  void deliver_as(const State& state, T* out) const;

  void take_memory() {
    int64_t size = p.cache.size, piece = kPiece / Math::width * p.cache.value_size;
    const bool converts = !Math::in_place(p.cache);
    const int64_t converted = !converts ? 0 : at_once() ? kSplit : kChunk;
    struct Need {
      void** at;
      int64_t bytes;
    };
    auto need = [](auto*& at, int64_t n) {
      return Need{reinterpret_cast<void**>(&at), div_up(n * int64_t(sizeof(*at)), 64) * 64};
    };
    const Need needs[] = {
        need(scores, score_rows() * score_stride()),
        need(weights, padded_rows(kPlanes * kGroupRows) * kWeightStride),
        need(all_totals, heads * kGroupRows * kLanes),
        need(all_queries, heads * padded * query_stride),
        need(converted_keys, p.cache.latent ? 0 : converted * lines),
        need(converted_values, std::max<int64_t>(converted / kPiece, 1) * piece),
        need(saved, turns ? heads * tile.rows * State::row_floats(p.value_size) : 0),
        need(chunk_totals, turns ? heads * tile.rows * kTwo : 0),
        need(key_scales, kSplit),
        need(value_scales, kSplit),
        need(all_fixed_queries, kFixed ? heads * tile.rows : 0),
        need(value_units, kFixed ? kGroupRows : 0),
        need(shares, kFixed ? kChunk : 0),
        need(sums, kFixed ? padded_rows(kPlanes * kGroupRows) * sum_stride() : 0),
        need(turned_queries, p.cache.latent ? lines * query_columns() : 0),
        need(key_rows, p.cache.latent ? kPiece * size : 0),
        need(turned_scores, p.cache.latent ? kPiece * (query_columns() + 16) : 0),
    };
    int64_t bytes = 0;
    for (const Need& n : needs) bytes += n.bytes;
    auto memory = static_cast<char*>(scratch(1, bytes));
    for (const Need& n : needs) *n.at = memory, memory += n.bytes;
  }

  template <class T>
  void load_queries(const T* q) {
    for (int r = 0; r < tile.rows; r++) {
      const T* from = q + (start + token(r)) * p.q_token + query_head(r) * p.q_head;
      Element* to = queries + kPlanes * r * query_stride;
      if constexpr (kFixed) {
        float row[kMaxSize];
        copy_row(from, row);
        fixed_queries[r] = split_query(row, p.cache.size, to, query_stride);
        fixed_queries[r].scale *= p.plain_scores() ? p.scale * kLog2E : p.scale;
      } else {
        copy_row(from, to);
      }
    }
    const int64_t used = kPlanes * tile.rows;
    std::memset(queries + used * query_stride, 0,
                (padded - used) * query_stride * sizeof(Element));
  }

  template <class T, class To>
  void copy_row(const T* from, To* to) const {
    for_lanes(p.size, [&](int64_t i, int n) { store_n(to + i, load_n(from + i, n), n); });
    std::memset(to + p.size, 0, (p.cache.size - p.size) * sizeof(To));
  }

  // Queries as a right-hand side [lines][rows], for keys that are stored as rows.
  void transpose_queries() {
    for (int64_t r = 0; r < query_columns(); r++)
      for (int64_t i = 0; i < lines; i++)
        turned_queries[i * query_columns() + r] =
            r < tile.rows ? load_raw<Line>(queries + r * query_stride + i * Math::width) : Line{};
  }

  // The block of a column of the split, and the offset in it.
  int64_t block_of(int64_t column, int64_t& inside) const {
    return block_at(tile, origin + column, inside);
  }
  int64_t block_at(const Tile& tile, int64_t position, int64_t& inside) const {
    const int32_t* table = p.tables + tile.sequence * p.table_stride;
    if (p.cache.block == kPiece) {  // without a division, which takes as long as a score's products
      inside = position % kPiece;
      return table[position / kPiece];
    }
    inside = position % p.cache.block;
    return table[position / p.cache.block];
  }

  // The queries of a tile, one token apart, to be fetched during this tile's last split.
  Gradual queries_of(const Tile& of, int64_t head) const {
    const int64_t width = p.dtype == kF32 ? 4 : 2, tokens = div_up(of.rows, p.group());
    const int64_t first = p.query_starts[of.sequence] + of.first / p.group();
    auto q = static_cast<const uint8_t*>(p.q) + head * p.group() * p.q_head * width;
    return {q + first * p.q_token * width, p.q_token * width, p.group() * p.size * width, tokens,
            calls()};
  }
  // Chunks of groups of rows in the last split.
  int64_t calls() const {
    const Span last = pieces(tile, (std::max(tile.end, 1) - 1) / kSplit);
    const int64_t chunks = div_up(last.high, kChunk) - last.low / kChunk;
    return std::max<int64_t>(chunks, 1) * div_up(tile.rows, kGroupRows);
  }

  // Prefetches a piece of the next chunk: its keys while keys are multiplied, its values with
  // values.
  void fetch_keys(int64_t index) const {
    if (tile.rows > kFewRows || turns || index >= next.pieces) return;
    int64_t inside, id = block_at(*next.tile, next.position + index * kPiece, inside);
    const int64_t line = p.cache.element() * Math::width;
    const uint8_t* keys = p.cache.keys(id, next.head) + inside * line;
    if (p.cache.block == kPiece) return fetch(keys, kPiece * line * lines);
    for (int64_t d = 0; d < lines; d++) fetch(keys + d * p.cache.block * line, kPiece * line);
  }

  void fetch_values(int64_t index) const {
    if (tile.rows > kFewRows || turns || index >= next.pieces) return;
    int64_t inside, id = block_at(*next.tile, next.position + index * kPiece, inside);
    const int64_t token = p.cache.value_size * p.cache.element();
    fetch(p.cache.values(id, next.head) + inside * token, kPiece * token);
  }

  // The keys of a piece of the next chunk, from a line and column on.
  Lines next_keys(int64_t index, int64_t line, int64_t column) const {
    if (index >= next.pieces || line >= lines || !Math::in_place(p.cache)) return {};
    int64_t inside, id = block_at(*next.tile, next.position + index * kPiece, inside);
    return {reinterpret_cast<const uint32_t*>(p.cache.keys(id, next.head)) + inside + column +
                line * p.cache.block,
            p.cache.block};
  }

  // With few rows, memory is the bottleneck: what is needed next is fetched meanwhile.
  template <class T, class Start, class Next>
  void multiply(Left<T> rows, const Start& at, int columns, Depth depth, Sums to,
                const Next& ahead) const {
    if constexpr (kFetchedInTiles)
      if (tile.rows <= kFewRows)
        return multiply_attention(rows, at, columns, depth, to, ahead);
    if constexpr (kFetchedInTurn)
      if (turns) return multiply_attention(rows, at, columns, depth, to, InTurn{upcoming});
    multiply_attention(rows, at, columns, depth, to);
  }

  // Prefetches into the second-level cache: the hardware prefetcher stops at a page, and a block is
  // several.
  static void fetch(const uint8_t* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
  }

  // The keys and values of columns of the split. Converted ones are at the beginning of the
  // buffers.
  void find(Span columns) {
    for (int64_t column = columns.low; column < columns.high; column += kPiece) {
      int64_t inside, id = block_of(column, inside);
      if constexpr (kFixed) gather_scales(id, inside, column);
      if (!p.cache.latent) find_keys(id, inside, column, column - columns.low);
      find_values(id, inside, column, column - columns.low);
    }
  }

  void gather_scales(int64_t id, int64_t inside, int64_t column) {
    const float* scales = p.cache.scales(id, head) + inside;
    std::memcpy(key_scales + column, scales, kPiece * sizeof(float));
    std::memcpy(value_scales + column, scales + p.cache.block, kPiece * sizeof(float));
  }

  void find_keys(int64_t id, int64_t inside, int64_t column, int64_t at) {
    const Line*& piece = keys[column / kPiece] = converted_keys + at * lines;
    if (Math::in_place(p.cache))
      piece = reinterpret_cast<const Line*>(p.cache.keys(id, head)) + inside;
    else if constexpr (!kFixed) Math::keys(p.cache, id, head, inside, converted_keys + at * lines);
  }

  void find_values(int64_t id, int64_t inside, int64_t column, int64_t at) {
    const int64_t size = p.cache.value_size, step = kPiece / Math::width * size;
    const int64_t valid = length - origin - column;
    const bool in_place = Math::in_place(p.cache);
    Line* buffer = converted_values + (in_place ? 0 : at / kPiece * step);
    const Line*& piece = values[column / kPiece] = buffer;
    if (in_place) {
      auto place =
          reinterpret_cast<const Line*>(p.cache.values(id, head)) + inside / Math::width * size;
      if (valid >= kPiece) piece = place;
      else std::memcpy(buffer, place, step * sizeof(Line));
    } else if constexpr (!kFixed) {
      Math::values(p.cache, id, head, inside, buffer);
    }
    if (valid < kPiece) Math::clear_after(buffer, valid, size);
  }

  // The columns that some row of the group sees, rounded to pieces.
  Span span() const {
    const int64_t first = bounds[0].first, last = bounds[group_rows() - 1].last;
    return {std::max(first / kPiece * kPiece, seen.low),
            std::min(div_up(last, kPiece) * kPiece, seen.high)};
  }

  // Which columns of the split each row of the group sees.
  void find_bounds() {
    const int64_t heads = p.group();
    int64_t position = base + token(group), h = (tile.first + group) % heads;
    for (int i = 0; i < group_rows(); i++) {
      int64_t first = 0, last = (p.causal && !masked ? position + 1 : length) - origin;
      if (p.window > 0) {
        first = std::max<int64_t>(position - p.window + 1 - origin, 0);
        last = std::min(last, position + p.window - origin);
      }
      bounds[i] = {first, std::min(std::max<int64_t>(last, 0), kSplit)};
      if (++h == heads) h = 0, position++;
    }
  }

  // One group of rows over the split, chunk by chunk.
  void attend(const State& states) {
    const int rows = group_rows();
    find_bounds();
    const Span columns = span();
    for (int64_t i = 0; i < heads; i++) {
      const State state = state_of(i, states);
      take_head(i);
      std::fill_n(state.peak + group, rows, kNever);
      std::fill_n(state.total + group, rows, 0.0f);
      if (columns.low >= columns.high) state.clear_values(group, rows);
      std::memset(totals, 0, rows * kLanes * sizeof(float));
    }
    if (columns.low >= columns.high) return;
    for (int64_t at = columns.low; at < columns.high; at = chunk.high) {
      chunk = first_chunk({at, columns.high});
      fresh = at == columns.low;
      next = after_chunk(columns);
      if constexpr (kFetchedInTurn && !kFixed)
        if (in_order(p.cache, tile.rows) && from_start()) {
          attend_in_order(states);
          continue;
        }
      if (turns) begin_fetching();
      for (int64_t i = 0; i < heads; i++) {
        take_head(i);
        attend_chunk(state_of(i, states));
      }
    }
    for (int64_t h = 0; h < heads; h++) {
      const State state = state_of(h, states);
      take_head(h);
      for (int i = 0; i < rows; i++) state.total[group + i] = sum(load(totals + i * kLanes));
    }
  }

  void attend_chunk(const State& state) {
    if (turns) upcoming.fetch<kBurst>();
    coming_queries.fetch();
    coming_results.fetch();
    if (!at_once()) find(chunk);
    if constexpr (kDirect && std::is_same<Math, PairMath>::value)
      if (soften_directly(state)) return add_values(state);
    if constexpr (kFixed && kPlanesJoined)
      if (tile.rows > kFewRows) return attend_planes(state);
    if (!p.cache.latent) add_scores();
    if (turns) upcoming.fetch<kBurst>();
    soften(state);
    add_values(state);
  }

  void take_head(int64_t i) {
    head = first_head + i;
    totals = all_totals + i * kGroupRows * kLanes;
    queries = all_queries + i * padded * query_stride;
    fixed_queries = all_fixed_queries + i * tile.rows;
  }
  State state_of(int64_t i, const State& states) const { return states.from(i * tile.rows); }

  void begin_fetching() {
    Run* run = runs;
    for (int64_t i = 0; i < next.pieces; i++) {
      int64_t inside, id = block_at(*next.tile, next.position + i * kPiece, inside);
      auto from = reinterpret_cast<const char*>(p.cache.keys(id, next.head));
      *run++ = {from, from + heads * p.cache.head_bytes()};
    }
    *run = {run == runs ? nullptr : run[-1].at, nullptr};
    upcoming = Cursor(runs);
  }

  Ahead after_chunk(Span columns) const {
    const Span after = first_chunk({chunk.high, columns.high});
    if (after.low >= after.high) return ahead;
    return {&tile, first_head, origin + after.low, (after.high - after.low) / kPiece};
  }

  int64_t chunk_origin() const { return chunk.low / kChunk * kChunk; }
  // The scores of the group's row i, from the origin of the chunk on.
  float* chunk_scores(int i) const {
    return p.cache.latent ? scores + (group + i) * score_stride() + chunk_origin()
                          : scores + i * score_stride();
  }

  void add_scores() {
    const int columns = int(chunk.high - chunk.low);
    const int64_t stride = Math::in_place(p.cache) ? p.cache.block : kPiece;
    const Line* const* pieces = keys + chunk.low / kPiece;
    auto at = [&](int, int c) {
      if (!kFetchedInTiles && c % kPiece == 0) fetch_keys(c / kPiece);
      return pieces[c / kPiece] + c % kPiece;
    };
    // Its values are needed after the keys of a chunk.
    auto ahead = [&](int, int c, int n) -> Lines {
      if (!Math::in_place(p.cache)) return {};
      return {reinterpret_cast<const uint32_t*>(values[chunk.low / kPiece + c / kPiece]) +
                  c % kPiece * lines,
              n};
    };
    const Left<Element> rows{queries + kPlanes * group * query_stride, query_stride,
                             kPlanes * group_rows()};
    float* to = chunk_scores(0) + (chunk.low - chunk_origin());
    const Depth depth{1, attention_lines<Math>(p.size, lines), stride};
    if constexpr (kFixed) {
      multiply(rows, at, columns, depth, Sums{sums, sum_stride(), true}, ahead);
      for (int i = 0; i < group_rows(); i++) {
        join_scores(fixed_queries[group + i], sums + kPlanes * i * sum_stride(), sum_stride(),
                    columns, key_scales + chunk.low, to + i * score_stride());
        if (turns) upcoming.fetch<kRowBurst>();
      }
    } else {
      multiply(rows, at, columns, depth, Sums{to, score_stride(), true}, ahead);
    }
  }

  // The scores of all rows and the whole split. Keys are the rows here and queries the columns; the
  // result is transposed.
  void add_latent_scores() {
    int64_t columns = query_columns(), turned = columns + 16;
    auto at = [&](int, int c) { return turned_queries + c; };
    for (int64_t column = seen.low; column < seen.high; column += kPiece) {
      Math::rows(values[column / kPiece], p.cache.size, key_rows);
      multiply_attention(Left<Element>{key_rows, p.cache.size, kPiece}, at, int(columns),
                         Depth{1, lines, columns}, Sums{turned_scores, turned, true});
      transpose(turned_scores, turned, kPiece, columns, scores + column, score_stride());
    }
  }

  void add_values(const State& state) {
    const int64_t size = p.cache.value_size;
    const int columns = int(div_up(p.value_size, 16) * 16);
    const int runs = int(chunk.high - chunk.low) / kPiece;
    const Line* const* pieces = values + chunk.low / kPiece;
    auto at = [&](int run, int c) {
      if (!kFetchedInTiles && !c) fetch_values(run);
      return pieces[run] + c;
    };
    auto ahead = [&](int run, int c, int) {
      return next_keys(run, c / kPiece * (kPiece / Math::width), c % kPiece);
    };
    const Left<Weight> rows{weights + (chunk.low - chunk_origin()), kWeightStride,
                            kPlanes * group_rows()};
    const int64_t unseen = std::max<int64_t>(chunk.high - bounds[group_rows() - 1].last, 0);
    const Depth depth{runs, kPiece / Math::width, size, div_up(kPiece - unseen, Math::width)};
    if constexpr (kFixed) {
      multiply(rows, at, columns, depth, Sums{sums, sum_stride(), true}, ahead);
      for (int i = 0; i < group_rows(); i++) {
        join_values(sums + kPlanes * i * sum_stride(), sum_stride(), columns, value_units[i],
                    fresh, state.row(group + i));
        if (turns) upcoming.fetch<kRowBurst>();
      }
    } else {
      multiply(rows, at, columns, depth, Sums{state.row(group), state.stride, fresh}, ahead);
    }
  }

  // Scores of the group in the chunk to weights (soften.h).
  void soften(const State& state);
  bool whole() const;
  bool from_start() const;
  bool soften_directly(const State& state);
  bool add_totals(const float* sums);
  void attend_in_order(const State& states);
  void attend_piece(int64_t column, const State& state, float* sums);
  void soften_seen(int i, const State& state);
  template <bool Whole>
  void soften_row(int i, Columns mine, float unit, const State& state);
  // In fixed point (planes.h).
  void attend_planes(const State& state);
  void share_out(Columns mine);
  template <bool Whole>
  void soften_planes(int i, Columns mine, float peak, const State& state);
  void raise(int i, float peak, const State& state);
  static void clear_weights(Weight* row, int64_t from, int64_t to);
  void hide_scores(int row, Columns mine) const;
  void finish_scores(int row, Columns mine) const;

  const Problem& p;
  const Tile& tile;
  const int64_t first_head, heads;
  int64_t head;  // the current one
  int64_t start, length, base;  // base: position of the sequence's first new token
  bool masked;  // whether the new tokens have masks
  bool turns;   // whether the tile is `in_turn`
  int64_t padded, lines, query_stride;
  // Of the split: its first token and the columns that the tile sees; the group's current chunk of
  // these, and whether it is the group's first.
  int64_t origin = 0;
  Span seen{}, chunk{};
  int group = 0;  // first row
  bool fresh = true;
  Columns bounds[kGroupRows];
  Ahead ahead{}, next{};
  Gradual coming_queries, coming_results;
  mutable Cursor upcoming;          // in `runs`: what of the next chunk is still to be fetched
  Run runs[kChunk / kPiece + 1];
  float* scores;            // of a group and chunk; if latent, of all rows and a split
  Weight* weights;          // [rows of a group * planes][columns of a chunk]
  float* totals;            // [rows of a group][lanes], of the current head, as the next two
  Element* queries;         // [rows * planes][size]
  FixedQuery* fixed_queries;
  float* all_totals;        // [heads], as the next two
  Element* all_queries;
  FixedQuery* all_fixed_queries;
  float* saved;             // of few rows: [heads][rows], as in a state
  float* chunk_totals;      // of few rows: [heads][rows][even, odd][lanes]
  float* value_units;       // [rows of a group]: of weights in fixed point
  float* shares;            // [columns of a chunk]: factors of weights before they are rounded
  float share_unit = 0.0f;  // of a weight times its share
  float* sums;              // [rows of a group * planes]: integers
  Line* turned_queries;     // [lines][rows]
  Element* key_rows;        // [32][size]
  float* turned_scores;     // [32][rows]
  Line *converted_keys, *converted_values;
  float *key_scales, *value_scales;  // [columns]
  const Line *keys[kSplit / kPiece], *values[kSplit / kPiece];
};

}  // namespace modulm
