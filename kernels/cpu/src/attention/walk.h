// One tile of rows over one split of cached tokens: scores, softmax, weighted values.
#pragma once

#include <algorithm>

#include "attention/exp2.h"
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
  using Line = typename Math::Line;

  Walk(const Problem& p, const Tile& tile, int64_t head) : p(p), tile(tile), head(head) {
    start = p.query_starts[tile.sequence];
    length = p.context_lens[tile.sequence];
    base = length - (p.query_starts[tile.sequence + 1] - start);
    padded = p.cache.latent ? query_columns() : padded_rows(tile.rows);
    lines = p.cache.size / Math::width;
    query_stride = p.cache.size + 64 / int64_t(sizeof(Element));
    take_memory();
    with_float(p.dtype, [&](auto t) { load_queries(static_cast<const decltype(t)*>(p.q)); });
    if (p.cache.latent) transpose_queries();
  }

  // The softmax of one split, from scratch.
  void split(int64_t index, const State& state) {
    origin = index * kSplit;
    low = std::max<int64_t>(tile.begin - origin, 0) / kPiece * kPiece;
    high = div_up(std::min<int64_t>(tile.end - origin, kSplit), kPiece) * kPiece;
    if (p.cache.scaled()) gather_scales();
    if (p.cache.latent) {
      find_values(low, high);
      add_latent_scores();
    } else {
      add_scores();
    }
    for (int r = 0; r < tile.rows; r += kGroupRows) {
      Span seen = span(r, low, high);
      for (int i = r; i < r + group_rows(r); i++) {
        if (p.cache.scaled()) soften<true>(i, seen, state);
        else soften<false>(i, seen, state);
      }
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
  static constexpr int64_t kScoreStride = kSplit + 16, kWeightStride = kSplit + 32;

  struct Span {
    int64_t low, high;  // columns of the split, multiples of 32
  };

  int group_rows(int r) const { return std::min(kGroupRows, tile.rows - r); }
  int64_t token(int r) const { return (tile.first + r) / p.group(); }
  int64_t query_head(int r) const { return head * p.group() + (tile.first + r) % p.group(); }
  int64_t query_columns() const { return div_up(tile.rows, 16) * 16; }

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
      Element* to = queries + r * query_stride;
      for_lanes(p.size, [&](int64_t i, int n) { store_n(to + i, load_n(from + i, n), n); });
      std::memset(to + p.size, 0, (p.cache.size - p.size) * sizeof(Element));
    }
    std::memset(queries + tile.rows * query_stride, 0,
                (padded - tile.rows) * query_stride * sizeof(Element));
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
    int64_t position = origin + column;
    inside = position % p.cache.block;
    return p.tables[tile.sequence * p.table_stride + position / p.cache.block];
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
    Math::keys(p.cache, id, head, inside, buffer);
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
      } else {
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
      keys[0] = find_keys(column, converted_keys, stride);
      if (columns > kPiece)
        keys[1] = find_keys(column + kPiece, converted_keys + kPiece * lines, stride);
      auto at = [&](int, int c) { return keys[c / kPiece] + c % kPiece; };
      for (int r = 0; r < tile.rows; r += kGroupRows) {
        Span seen = span(r, column, column + columns);
        if (seen.low >= seen.high) continue;
        multiply_attention(
            Left<Element>{queries + r * query_stride, query_stride, group_rows(r)}, at, columns,
            Depth{1, lines, stride}, Sums{scores + r * kScoreStride + column, kScoreStride, true});
      }
    }
  }

  // Keys are the rows here and queries the columns; the result is turned round.
  void add_latent_scores() {
    int64_t columns = query_columns(), turned = columns + 16;
    auto at = [&](int, int c) { return turned_queries + c; };
    for (int64_t column = low; column < high; column += kPiece) {
      Math::rows(values[column / kPiece], p.cache.size, key_rows);
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
      auto at = [&](int run, int c) { return pieces[run] + c; };
      multiply_attention(
          Left<Element>{weights + r * kWeightStride + seen.low, kWeightStride, group_rows(r)}, at,
          columns, Depth{int((seen.high - seen.low) / kPiece), kPiece / Math::width, size},
          Sums{state.row(r), state.stride, first});
    }
  }

  // Scores of row r to weights over the columns of its group, and the row's maximum and sum.
  template <bool Scaled>
  void soften(int r, Span seen, const State& state) {
    float* x = scores + r * kScoreStride;
    Element* to = weights + r * kWeightStride;
    state.peak[r] = kNever;
    state.total[r] = 0.0f;
    if (seen.low >= seen.high) return;
    int64_t first, last;
    bounds(r, first, last);
    first = std::max(first, seen.low);
    if (first >= last) {
      std::memset(to + seen.low, 0, (seen.high - seen.low) * sizeof(Element));
      return;
    }
    const float unit = p.plain_scores() ? p.scale * kLog2E : kLog2E;
    if (!p.plain_scores()) finish_scores(r, first, last, x);
    const int64_t begin = first / kLanes * kLanes, end = div_up(last, kLanes) * kLanes;
    vf most = splat(kNever);
    for (int64_t i = begin; i < end; i += kLanes) {
      vf score = load(x + i);
      if (i < first || i + kLanes > last) score = within(i, first, last, score, splat(kNever));
      most = vmax(score, most);
    }
    const float peak = largest(most) * unit;
    if (peak == kNever) {  // every score is -infinity
      std::memset(to + seen.low, 0, (seen.high - seen.low) * sizeof(Element));
      return;
    }
    std::memset(to + seen.low, 0, (begin - seen.low) * sizeof(Element));
    vf total{};
    for (int64_t i = begin; i < end; i += kLanes) {
      vf weight = vexp2<Math::coarse>(load(x + i) * unit - peak);
      vf kept = Scaled ? weight * load(value_scales + i) : weight;
      if (i < first || i + kLanes > last) {
        weight = within(i, first, last, weight, vf{});
        kept = within(i, first, last, kept, vf{});
      }
      total += weight;
      store(to + i, kept);
    }
    std::memset(to + end, 0, (seen.high - end) * sizeof(Element));
    state.peak[r] = peak;
    state.total[r] = sum(total);
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
      if (p.cache.scaled()) score *= load(key_scales + i);
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
  float* scores;            // [rows][columns]
  Element* weights;         // [rows][columns]
  Element* queries;         // [rows][size]
  Line* turned_queries;     // [lines][rows]
  Element* key_rows;        // [32][size]
  float* turned_scores;     // [32][rows]
  Line* converted_keys;     // two pieces
  Line* converted_values;   // up to a split
  float *key_scales, *value_scales;  // [columns]
  const Line* values[kSplit / kPiece];
};

}  // namespace modulm
