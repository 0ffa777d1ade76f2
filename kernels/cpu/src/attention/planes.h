// Weights in fixed point, and groups of many rows whose sums of both planes are joined in registers:
// members of Walk.
//
// Weights are relative to the highest score so far, so they are at most 1. They are multiplied by the
// scales of their values before they are rounded; share_unit is what a code of 1 stands for.
#pragma once

#include "attention/walk.h"

namespace modulm {

// What weights of these columns of the chunk are multiplied by.
template <class Math>
void Walk<Math>::share_out(Columns mine) {
  const float* scales = value_scales + chunk_origin();
  const float most = row_peak(scales, mine), share = most > 0.0f ? kLargestWeight / most : 0.0f;
  share_unit = most / kLargestWeight;
  for (int64_t i = weights_begin(mine); i < weights_end(mine); i += kLanes) {
    const vf each = load(scales + i) * share;
    store(shares + i, mine.cut(i, kLanes) ? within(i, mine, each, vf{}) : each);
  }
}

// One row, whose highest score in the chunk is `peak`. Whole: `shares` are those of all columns.
template <class Math>
template <bool Whole>
void Walk<Math>::soften_planes(int i, Columns mine, float peak, const State& state) {
  const int r = group + i;
  Weight* to = weights + kPlanes * i * kWeightStride;
  raise(i, peak, state);
  if (state.peak[r] == kNever) {
    value_units[i] = 0.0f;
    return clear_weights(to, weights_begin(mine), weights_end(mine));
  }
  if (!Whole) share_out(mine);
  value_units[i] = share_unit;
  const vf total = row_planes<Whole>(chunk_scores(i), mine, state.peak[r], shares, to, kWeightStride);
  store(totals + i * kLanes, load(totals + i * kLanes) + total);
}

// A chunk of a group of many rows. Scores of kPairRows rows become weights before those of the next ones.
template <class Math>
void Walk<Math>::attend_planes(const State& state) {
  const bool all = whole();
  if (all) share_out({0, kChunk});
  alignas(64) float peaks[kPairRows * kLanes];
  const FixedKeys part{keys + chunk.low / kPiece, attention_lines<Math>(p.size, lines),
                       p.cache.block, key_scales + chunk.low, int(chunk.high - chunk.low)};
  for (int i = 0; i < group_rows(); i += kPairRows) {
    const int rows = std::min(kPairRows, group_rows() - i), r = group + i;
    add_keys(part, {queries + kPlanes * r * query_stride, query_stride, fixed_queries + r,
                    chunk_scores(i) + (chunk.low - chunk_origin()), score_stride(), peaks}, rows);
    for (int j = 0; j < rows; j++) {
      if (all) soften_planes<true>(i + j, {0, kChunk}, largest(load(peaks + j * kLanes)), state);
      else soften_seen(i + j, state);
    }
  }
  const int64_t unseen = std::max<int64_t>(chunk.high - bounds[group_rows() - 1].last, 0);
  add_fixed_values({values + chunk.low / kPiece, int(chunk.high - chunk.low) / kPiece,
                    p.cache.value_size, div_up(kPiece - unseen, Math::width),
                    int(div_up(p.value_size, 16) * 16)},
                   {weights + (chunk.low - chunk_origin()), kWeightStride, value_units,
                    state.row(group), state.stride, fresh}, group_rows());
}

}  // namespace modulm
