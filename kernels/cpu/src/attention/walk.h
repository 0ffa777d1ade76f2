// One tile of rows over one split of cached tokens: scores, softmax, weighted values.
#pragma once

#include <algorithm>

#include "attention/exp2.h"
#include "attention/fixed.h"
#include "attention/math.h"
#include "attention/plan.h"
#include "attention/problem.h"
#include "attention/state.h"
#include "attention/transpose.h"
#include "base/pool.h"

namespace modulm {

template <class Math>
class Walk {
 public:
  using Element = typename Math::Element;
  using Weight = typename Math::Weight;
  using Line = typename Math::Line;

  Walk(const Problem& p, const Tile& tile, int64_t head) : p(p), tile(tile), head(head) {
    start = p.query_starts[tile.sequence];
    length = p.context_lens[tile.sequence];
    base = length - (p.query_starts[tile.sequence + 1] - start);
    padded = p.cache.latent ? query_columns() : padded_rows(kPlanes * tile.rows);
    lines = p.cache.size / Math::width;
    query_stride = p.cache.size + 64 / int64_t(sizeof(Element));
    take_memory();
    with_float(p.dtype, [&](auto t) { load_queries(static_cast<const decltype(t)*>(p.q)); });
    if (p.cache.latent) transpose_queries();
  }

  // The softmax of one split, from scratch.
  void split(int64_t index, const State& state) {
    origin = index * kSplit;
    fetched = 0;
    Span seen = pieces(tile, index);
    low = seen.low;
    high = seen.high;
    if constexpr (kFixed) gather_scales();
    if (p.cache.latent) {
      find_values(low, high);
      add_latent_scores();
    } else {
      add_scores();
    }
    for (int r = 0; r < tile.rows; r += kGroupRows) {
      seen = span(r, low, high);
      for (int i = r; i < r + group_rows(r); i++) soften(i, seen, state);
    }
    // Few rows: converted values are used while they are in the first-level cache.
    bool whole = Math::in_place(p.cache) || p.cache.latent || tile.rows > 16;
    for (int64_t at = low; at < high;) {
      int64_t stop = whole ? high : std::min(at + 2 * kPiece, high);
      if (!p.cache.latent) find_values(at, stop);
      add_values({at, stop}, state);
      at = stop;
    }
  }

  // Names the split that this thread does after the present one: its keys come from memory while
  // values are multiplied. Few rows take less time than memory does, which otherwise would rest.
  void then(const Tile& tile, int64_t head, int64_t index) {
    if (tile.rows > kFewRows || p.cache.latent) return;
    Span seen = pieces(tile, index);
    ahead = {&tile, head, index * kSplit + seen.low, (seen.high - seen.low) / kPiece};
  }

  void last() { ahead = {}; }

  template <class T>
  void deliver(const State& state, T* out) const {
    for (int r = 0; r < tile.rows; r++) {
      int64_t h = query_head(r);
      float factor = 1.0f;
      if (p.sinks) {
        float sink = p.sinks[h] * kLog2E, peak = std::max(state.peak[r], sink);
        factor = decay(state.peak[r], peak);
        state.total[r] = state.total[r] * factor + decay(sink, peak);
      }
      factor = state.total[r] == 0.0f ? 0.0f : factor / state.total[r];
      T* to = out + ((start + token(r)) * p.heads + h) * p.value_size;
      for_lanes(p.value_size, [&](int64_t i, int n) {
        store_n(to + i, load(state.row(r) + i) * factor, n);
      });
    }
  }

 private:
  // Rows that share the bounds of what they see, and one set of tiles.
#if defined(__AMX_BF16__)
  static constexpr int kGroupRows = 32;
#else
  static constexpr int kGroupRows = 4 * kPairRows;
#endif
  static constexpr int64_t kScoreStride = kSplit + 16;
  static constexpr int64_t kWeightStride = kSplit + 64 / sizeof(Weight);
  static constexpr int kPlanes = Math::planes;
  static constexpr bool kFixed = kPlanes == 2;

  static constexpr int kFewRows = 16;

  struct Span {
    int64_t low, high;  // columns of the split, multiples of 32
  };

  // Keys that are fetched ahead: pieces from a position on.
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

  int group_rows(int r) const { return std::min(kGroupRows, tile.rows - r); }
  int64_t token(int r) const { return (tile.first + r) / p.group(); }
  int64_t query_head(int r) const { return head * p.group() + (tile.first + r) % p.group(); }
  int64_t query_columns() const { return div_up(tile.rows, 16) * 16; }
  int64_t sum_stride() const { return std::max<int64_t>(2 * kPiece, p.cache.value_size) + 16; }

  void take_memory() {
    int64_t size = p.cache.size, value_lines = kSplit / Math::width * p.cache.value_size;
    struct Need {
      void** at;
      int64_t bytes;
    };
    auto need = [](auto*& at, int64_t n) {
      return Need{reinterpret_cast<void**>(&at), div_up(n * int64_t(sizeof(*at)), 64) * 64};
    };
    const Need needs[] = {
        need(scores, padded * kScoreStride),
        need(weights, padded * kWeightStride),
        need(queries, padded * query_stride),
        need(converted_keys, 2 * kPiece * lines),
        need(converted_values, value_lines),
        need(key_scales, kSplit),
        need(value_scales, kSplit),
        need(fixed_queries, kFixed ? tile.rows : 0),
        need(value_units, kFixed ? tile.rows : 0),
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
        fixed_queries[r] = split_query(row, p.cache.size, to, to + query_stride);
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

  // The block and the place in it of a column of the split.
  int64_t block_of(int64_t column, int64_t& inside) const {
    return block_at(tile, origin + column, inside);
  }
  int64_t block_at(const Tile& tile, int64_t position, int64_t& inside) const {
    inside = position % p.cache.block;
    return p.tables[tile.sequence * p.table_stride + position / p.cache.block];
  }

  void fetch_values(int64_t column) const {
    int64_t inside, id = block_of(column, inside);
    const int64_t token = p.cache.value_size * p.cache.element();
    fetch(p.cache.values(id, head) + inside * token, kPiece * token);
  }

  // The part of the keys ahead that is due with the piece `index` of `count`, once.
  void fetch_ahead(int64_t index, int64_t count) {
    for (; fetched < std::min(ahead.pieces, div_up((index + 1) * ahead.pieces, count)); fetched++) {
      int64_t inside;
      int64_t id = block_at(*ahead.tile, ahead.position + fetched * kPiece, inside);
      const int64_t line = p.cache.element() * Math::width;
      const uint8_t* keys = p.cache.keys(id, ahead.head) + inside * line;
      for (int64_t d = 0; d < lines; d++) fetch(keys + d * p.cache.block * line, kPiece * line);
    }
  }

  // Into the second-level cache: hardware sees no further than a page, and a block is a few.
  static void fetch(const uint8_t* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
  }

  void gather_scales() {
    for (int64_t column = low; column < high; column += kPiece) {
      int64_t inside, id = block_of(column, inside);
      const float* scales = p.cache.scales(id, head) + inside;
      std::memcpy(key_scales + column, scales, kPiece * sizeof(float));
      std::memcpy(value_scales + column, scales + p.cache.block, kPiece * sizeof(float));
    }
  }

  const Line* find_keys(int64_t column, Line* buffer, int64_t& stride) const {
    int64_t inside, id = block_of(column, inside);
    stride = p.cache.block;
    if (Math::in_place(p.cache))
      return reinterpret_cast<const Line*>(p.cache.keys(id, head)) + inside;
    if constexpr (!kFixed) Math::keys(p.cache, id, head, inside, buffer);
    stride = kPiece;
    return buffer;
  }

  void find_values(int64_t from, int64_t to) {
    int64_t size = p.cache.value_size, step = kPiece / Math::width * size;
    for (int64_t column = from; column < to; column += kPiece) {
      int64_t inside, id = block_of(column, inside);
      int64_t valid = length - origin - column;
      // Chunks that are used at once share one buffer.
      Line* buffer = converted_values + (column - from) / kPiece * step;
      const Line*& piece = values[column / kPiece] = buffer;
      if (Math::in_place(p.cache)) {
        auto place = reinterpret_cast<const Line*>(p.cache.values(id, head)) +
                     inside / Math::width * size;
        if (valid >= kPiece) piece = place;
        else std::memcpy(buffer, place, step * sizeof(Line));
      } else if constexpr (!kFixed) {
        Math::values(p.cache, id, head, inside, buffer);
      }
      if (valid < kPiece) Math::clear_after(buffer, valid, size);
    }
  }

  // The columns among [from, to) that some row of the group at r sees, rounded to pieces.
  Span span(int r, int64_t from, int64_t to) const {
    int64_t first, last, unused;
    bounds(r, first, unused);
    bounds(r + group_rows(r) - 1, unused, last);
    return {std::max(first / kPiece * kPiece, from), std::min(div_up(last, kPiece) * kPiece, to)};
  }

  // Which columns row r sees, [first, last); it sees none if first >= last.
  void bounds(int r, int64_t& first, int64_t& last) const {
    int64_t position = base + token(r);
    last = (p.causal ? position + 1 : length) - origin;
    first = 0;
    if (p.window > 0) {
      first = std::max<int64_t>(position - p.window + 1 - origin, 0);
      last = std::min(last, position + p.window - origin);
    }
    last = std::min(std::max<int64_t>(last, 0), kSplit);
  }

  void add_scores() {
    for (int64_t column = low; column < high; column += 2 * kPiece) {
      int64_t stride;
      const Line* keys[2];
      int columns = int(std::min<int64_t>(2 * kPiece, high - column));
      if (tile.rows <= kFewRows)
        for (int64_t at = column; at < column + columns; at += kPiece) fetch_values(at);
      keys[0] = find_keys(column, converted_keys, stride);
      if (columns > kPiece)
        keys[1] = find_keys(column + kPiece, converted_keys + kPiece * lines, stride);
      auto at = [&](int, int c) { return keys[c / kPiece] + c % kPiece; };
      for (int r = 0; r < tile.rows; r += kGroupRows) {
        Span seen = span(r, column, column + columns);
        if (seen.low >= seen.high) continue;
        Left<Element> rows{queries + kPlanes * r * query_stride, query_stride,
                           kPlanes * group_rows(r)};
        float* to = scores + r * kScoreStride + column;
        const Depth depth{1, lines, stride};
        if constexpr (kFixed) {
          multiply_attention(rows, at, columns, depth, Sums{sums, sum_stride(), true});
          for (int i = 0; i < group_rows(r); i++)
            join_scores(fixed_queries[r + i], sums + 2 * i * sum_stride(),
                        sums + (2 * i + 1) * sum_stride(), columns, to + i * kScoreStride);
        } else {
          multiply_attention(rows, at, columns, depth, Sums{to, kScoreStride, true});
        }
      }
    }
  }

  // Keys are the rows here and queries the columns; the result is turned round.
  void add_latent_scores() {
    int64_t columns = query_columns(), turned = columns + 16;
    auto at = [&](int, int c) { return turned_queries + c; };
    for (int64_t column = low; column < high; column += kPiece) {
      if constexpr (!kFixed) Math::rows(values[column / kPiece], p.cache.size, key_rows);
      multiply_attention(Left<Element>{key_rows, p.cache.size, kPiece}, at, int(columns),
                         Depth{1, lines, columns}, Sums{turned_scores, turned, true});
      transpose(turned_scores, turned, kPiece, columns, scores + column, kScoreStride);
    }
  }

  void add_values(Span chunk, const State& state) {
    const int64_t size = p.cache.value_size;
    const int columns = int(div_up(p.value_size, 16) * 16);
    for (int r = 0; r < tile.rows; r += kGroupRows) {
      Span seen = span(r, chunk.low, chunk.high);
      bool first = chunk.low == low;
      if (seen.low >= seen.high) {
        if (first) state.clear_values(r, group_rows(r));
        continue;
      }
      const Line* const* pieces = values + seen.low / kPiece;
      auto at = [&](int run, int c) {
        if (!c) fetch_ahead((seen.low - low) / kPiece + run, (high - low) / kPiece);
        return pieces[run] + c;
      };
      Left<Weight> rows{weights + kPlanes * r * kWeightStride + seen.low, kWeightStride,
                        kPlanes * group_rows(r)};
      const Depth depth{int((seen.high - seen.low) / kPiece), kPiece / Math::width, size};
      if constexpr (kFixed) {
        multiply_attention(rows, at, columns, depth, Sums{sums, sum_stride(), true});
        for (int i = 0; i < group_rows(r); i++)
          join_values(sums + 2 * i * sum_stride(), sums + (2 * i + 1) * sum_stride(), columns,
                      value_units[r + i], state.row(r + i));
      } else {
        multiply_attention(rows, at, columns, depth, Sums{state.row(r), state.stride, first});
      }
    }
  }

  // Scores of row r to weights over the columns of its group, and the row's maximum and sum.
  void soften(int r, Span seen, const State& state) {
    float* x = scores + r * kScoreStride;
    state.peak[r] = kNever;
    state.total[r] = 0.0f;
    if constexpr (kFixed) value_units[r] = 0.0f;
    int64_t first, last;
    bounds(r, first, last);
    first = std::max(first, seen.low);
    if (first >= last) return clear_weights(r, seen.low, seen.high);
    const float unit = p.plain_scores() ? p.scale * kLog2E : kLog2E;
    if (!p.plain_scores()) finish_scores(r, first, last, x);
    const float peak = peak_within(x, first, last) * unit;
    if (peak == kNever) return clear_weights(r, seen.low, seen.high);
    const int64_t begin = first / kLanes * kLanes, end = div_up(last, kLanes) * kLanes;
    clear_weights(r, seen.low, begin);
    clear_weights(r, end, seen.high);
    float value_unit = 0.0f;
    if constexpr (kFixed) value_unit = value_units[r] = peak_within(value_scales, first, last);
    const float share = value_unit > 0.0f ? 1.0f / value_unit : 0.0f;
    Weight* to = weights + kPlanes * r * kWeightStride;
    vf total{};
    for (int64_t i = begin; i < end; i += kLanes) {
      vf weight = vexp2<Math::coarse>(load(x + i) * unit - peak);
      vf kept = kFixed ? weight * (load(value_scales + i) * share) : weight;
      if (i < first || i + kLanes > last) {
        weight = within(i, first, last, weight, vf{});
        kept = within(i, first, last, kept, vf{});
      }
      total += weight;
      if constexpr (kFixed) split_weights(kept, to + i, to + kWeightStride + i);
      else store(to + i, kept);
    }
    state.peak[r] = peak;
    state.total[r] = sum(total);
  }

  void clear_weights(int r, int64_t from, int64_t to) {
    for (int plane = 0; from < to && plane < kPlanes; plane++)
      std::memset(weights + (kPlanes * r + plane) * kWeightStride + from, 0,
                  (to - from) * sizeof(Weight));
  }

  static float peak_within(const float* x, int64_t first, int64_t last) {
    vf most = splat(kNever);
    for (int64_t i = first / kLanes * kLanes; i < last; i += kLanes) {
      vf each = load(x + i);
      if (i < first || i + kLanes > last) each = within(i, first, last, each, splat(kNever));
      most = vmax(each, most);
    }
    return largest(most);
  }

  static vi lanes_from(int64_t column) {
    vi lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    return lane + int32_t(column);
  }
  static vf within(int64_t column, int64_t first, int64_t last, vf yes, vf no) {
    vi at = lanes_from(column);
    return choose((at >= int32_t(first)) & (at < int32_t(last)), yes, no);
  }

  // What happens to scores beyond a factor: scales of keys, the softcap, distances.
  void finish_scores(int r, int64_t first, int64_t last, float* x) const {
    const float slope = p.alibi ? p.alibi[query_head(r)] : 0.0f;
    const int64_t own = base + token(r) - origin;
    for (int64_t i = first / kLanes * kLanes; i < last; i += kLanes) {
      vf score = load(x + i) * p.scale;
      if constexpr (kFixed) score *= load(key_scales + i);
      if (p.softcap > 0) score = vtanh(score / p.softcap) * p.softcap;
      if (p.alibi) score -= __builtin_convertvector(int32_t(own) - lanes_from(i), vf) * slope;
      store(x + i, score);
    }
  }

  const Problem& p;
  const Tile& tile;
  int64_t head, start, length, base;  // base: position of the sequence's first new token
  int64_t padded, lines, query_stride;
  int64_t origin = 0, low = 0, high = 0;  // of the split: first token; columns that the tile sees
  Ahead ahead{};
  int64_t fetched = 0;      // pieces of those ahead
  float* scores;            // [rows][columns]
  Weight* weights;          // [rows * planes][columns]
  Element* queries;         // [rows * planes][size]
  FixedQuery* fixed_queries;
  float* value_units;       // [rows]: of weights in fixed point
  float* sums;              // [rows of a group * planes]: integers
  Line* turned_queries;     // [lines][rows]
  Element* key_rows;        // [32][size]
  float* turned_scores;     // [32][rows]
  Line* converted_keys;     // two pieces
  Line* converted_values;   // up to a split
  float *key_scales, *value_scales;  // [columns]
  const Line* values[kSplit / kPiece];
};

}  // namespace modulm
