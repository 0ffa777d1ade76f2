// One or two rows over a chunk in the order of memory, block by block and head by head: members of Walk.
//
// Keys and values of a head lie side by side in a block, and so do heads. If they are read in this
// order, the processor's own prefetchers are ahead, and others only take their place. With more rows
// they pause while lines are multiplied again.
//
// Weights are relative to a maximum that is known after the first piece of a split. Whether some
// became too large shows at the end of the chunk, which is then computed again, head by head.
#pragma once

#include "attention/walk.h"

namespace modulm {

template <class Math>
void Walk<Math>::attend_in_order(const State& states) {
  if (!fresh)
    for (int64_t i = 0; i < heads; i++)
      std::memcpy(saved + i * tile.rows * states.stride, state_of(i, states).row(0),
                  tile.rows * states.stride * sizeof(float));
  std::memset(chunk_totals, 0, heads * tile.rows * kTwo * sizeof(float));
  for (int64_t column = chunk.low; column < chunk.high; column += kPiece) {
    int64_t inside, id = block_of(column, inside);
    for (int64_t i = 0; i < heads; i++) {
      take_head(i);
      find_keys(id, inside, column, 0);
      find_values(id, inside, column, 0);
      attend_piece(column, state_of(i, states), chunk_totals + i * tile.rows * kTwo);
    }
  }
  for (int64_t i = 0; i < heads; i++) {
    take_head(i);
    if (add_totals(chunk_totals + i * tile.rows * kTwo)) continue;
    const State state = state_of(i, states);
    if (fresh) std::fill_n(state.peak, tile.rows, kNever);
    else
      std::memcpy(state.row(0), saved + i * tile.rows * state.stride,
                  tile.rows * state.stride * sizeof(float));
    runs[0] = {nullptr, nullptr};
    upcoming = Cursor(runs);
    attend_chunk(state);
  }
}

// sums: [row][even, odd][lanes], of the weights of a chunk up to here.
template <class Math>
void Walk<Math>::attend_piece(int64_t column, const State& state, float* sums) {
  const bool first = fresh && column == chunk.low;
  // Only the last piece of a context has columns that a row does not see.
  const int64_t unseen = std::max<int64_t>(column + kPiece - bounds[tile.rows - 1].last, 0);
  const bool cut = bounds[0].last < column + kPiece;
  const float unit = p.scale * kLog2E;
  const Line *key = keys[column / kPiece], *value = values[column / kPiece];
  multiply_attention(Left<Element>{queries, query_stride, tile.rows},
                     [&](int, int c) { return key + c; }, kPiece,
                     Depth{1, attention_lines<Math>(p.size, lines), kPiece},
                     Sums{scores, score_stride(), true});
  for (int r = 0; r < tile.rows; r++, sums += kTwo) {
    const float* x = scores + r * score_stride();
    float& peak = state.peak[r];
    const Columns mine{0, std::min<int64_t>(bounds[r].last - column, kPiece)};
    if (first) peak = std::max(row_peak(x, mine) * unit, kNever);
    vf a = vexp2<Math::coarse>(load(x) * unit - peak);
    vf b = vexp2<Math::coarse>(load(x + kLanes) * unit - peak);
    if (cut) a = within(0, mine, a, vf{}), b = within(kLanes, mine, b, vf{});
    store(sums, load(sums) + a);
    store(sums + kLanes, load(sums + kLanes) + b);
    store_two(weights + r * kWeightStride, a, b);
  }
  multiply_attention(Left<Weight>{weights, kWeightStride, tile.rows},
                     [&](int, int c) { return value + c; }, int(div_up(p.value_size, 16) * 16),
                     Depth{1, kPiece / Math::width, p.cache.value_size,
                           div_up(kPiece - unseen, Math::width)},
                     Sums{state.row(0), state.stride, first});
}

}  // namespace modulm
