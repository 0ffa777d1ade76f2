// Scores of a group of rows in a chunk to weights: members of Walk.
#pragma once

#include "attention/walk.h"

namespace modulm {

// Whether every row sees all of the chunk, and its scores are products.
template <class Math>
bool Walk<Math>::whole() const {
  const int64_t from = chunk_origin();
  return !kFixed && p.plain_scores() && !(masked && origin + chunk.high > base) &&
         bounds[group_rows() - 1].first <= from && bounds[0].last >= from + kChunk;
}

// Whether every row sees the first column of the chunk and all up to its last, and scores are products.
template <class Math>
bool Walk<Math>::from_start() const {
  const int64_t from = chunk_origin();
  return !kFixed && p.plain_scores() && !(masked && origin + chunk.high > base) &&
         bounds[group_rows() - 1].first <= from && bounds[0].last > from;
}

// Weights of many rows from products; false if that is not possible or some weights became large.
template <class Math>
bool Walk<Math>::soften_directly(const State& state) {
  if (fresh || tile.rows <= kFewRows || p.cache.latent || !whole()) return false;
  const int rows = group_rows();
  const Line* const* pieces = keys + chunk.low / kPiece;
  alignas(64) float all[kGroupRows * 2 * kLanes];
  Direct half{nullptr, nullptr, attention_lines<Math>(p.size, lines),
              Math::in_place(p.cache) ? p.cache.block : kPiece, p.scale * kLog2E, false};
  DirectRows at{queries + group * query_stride, query_stride, state.peak + group,
                weights, kWeightStride, all};
  for (int64_t column = 0; column < kChunk; column += 2 * kPiece, pieces += 2) {
    half.first = pieces[0], half.second = pieces[1], half.continues = column > 0;
    direct_tiles(half, at, rows);
    at.weights += 2 * kPiece;
  }
  return add_totals(all);
}

// Adds a chunk's weights to the totals of rows unless some are too large. sums: [row][even, odd][lanes].
template <class Math>
bool Walk<Math>::add_totals(const float* sums) {
  const int rows = group_rows();
  auto total = [&](int i) { return load(sums + i * kTwo) + load(sums + i * kTwo + kLanes); };
  for (int i = 0; i < rows; i++)
    if (any_beyond(total(i), kLarge)) return false;
  for (int i = 0; i < rows; i++) store(totals + i * kLanes, load(totals + i * kLanes) + total(i));
  return true;
}

template <class Math>
void Walk<Math>::soften(const State& state) {
  const int64_t from = chunk_origin();
  const int rows = group_rows();
  const bool hides = masked && origin + chunk.high > base;
  if (whole()) {
    for (int i = 0; i < rows; i++) soften_row<true>(i, {0, kChunk}, p.scale * kLog2E, state);
    return;
  }
  const Columns all{chunk.low - from, chunk.high - from};
  for (int i = 0; i < rows; i++) {
    const Columns mine{std::max(bounds[i].first - from, all.first),
                       std::min(bounds[i].last - from, all.last)};
    if constexpr (kFixed) value_units[i] = 0.0f;
    Weight* row = weights + kPlanes * i * kWeightStride;
    if (mine.none()) {
      clear_weights(row, all.first, all.last);
      continue;
    }
    if (!p.plain_scores()) finish_scores(i, mine);
    if (hides) hide_scores(i, mine);
    if (kFixed && turns) upcoming.fetch<kRowBurst>();
    soften_row<false>(i, mine, p.plain_scores() ? p.scale * kLog2E : kLog2E, state);
    clear_weights(row, all.first, std::min(weights_begin(mine), all.last));
    clear_weights(row, std::max(weights_end(mine), all.first), all.last);
  }
}

// One row. Weights are relative to the highest score of the first piece until later ones become large:
// bf16 and fp32 are as precise above 1 as below. In fixed point, to the highest so far.
template <class Math>
template <bool Whole>
void Walk<Math>::soften_row(int i, Columns mine, float unit, const State& state) {
  const int r = group + i;
  const float* x = chunk_scores(i);
  Weight* to = weights + kPlanes * i * kWeightStride;
  auto raised = [&](Columns among) {
    raise(i, row_peak(x, among) * unit, state);
    if (state.peak[r] == kNever) clear_weights(to, weights_begin(mine), weights_end(mine));
    return state.peak[r] > kNever;
  };
  const Columns first{mine.first, std::min(mine.last, mine.first / kPiece * kPiece + kPiece)};
  if (kFixed && !raised(mine)) return;
  if (!kFixed && state.peak[r] == kNever && !raised(first) && !raised(mine)) return;
  vf total;
  if constexpr (kFixed) {
    const float* scales = value_scales + chunk_origin();
    const float most = value_units[i] = row_peak(scales, mine);
    total = row_planes(x, mine, unit, state.peak[r], scales, most > 0.0f ? 1.0f / most : 0.0f,
                       to, kWeightStride);
  } else {
    total = row_weights<Math, Whole>(x, mine, unit, state.peak[r], to);
    if (any_beyond(total, kLarge)) {
      if (!raised(mine)) return;
      total = row_weights<Math, Whole>(x, mine, unit, state.peak[r], to);
    }
  }
  store(totals + i * kLanes, load(totals + i * kLanes) + total);
}

// Rescales the state of the group's row i to a higher maximum score.
template <class Math>
void Walk<Math>::raise(int i, float peak, const State& state) {
  const int r = group + i;
  const float before = state.peak[r];
  if (!(peak > before)) return;
  state.peak[r] = peak;
  if (fresh) return;
  const float factor = decay(before, peak);
  store(totals + i * kLanes, load(totals + i * kLanes) * factor);
  float* row = state.row(r);
  for (int64_t c = 0; c < state.stride - 16; c += kLanes) store(row + c, load(row + c) * factor);
}

template <class Math>
void Walk<Math>::clear_weights(Weight* row, int64_t from, int64_t to) {
  for (int plane = 0; from < to && plane < kPlanes; plane++)
    std::memset(row + plane * kWeightStride + from, 0, (to - from) * sizeof(Weight));
}

// Scores of new tokens that the row does not see: so low that they add nothing, but not infinite,
// since a chunk may have no others.
template <class Math>
void Walk<Math>::hide_scores(int row, Columns mine) const {
  const uint64_t sees = p.masks[start + token(group + row)];
  const int64_t own = base - origin - chunk_origin();
  float* x = chunk_scores(row);
  for (int64_t i = std::max(mine.first, own); i < mine.last; i++)
    if (!(sees >> (i - own) & 1)) x[i] = kHidden;
}

// Transformations of scores other than a constant factor: scales of keys, the softcap, distances.
template <class Math>
void Walk<Math>::finish_scores(int row, Columns mine) const {
  const int r = group + row;
  float* x = chunk_scores(row);
  const float slope = p.alibi ? p.alibi[query_head(r)] : 0.0f;
  const int64_t own = base + token(r) - origin - chunk_origin();
  for (int64_t i = mine.first / kLanes * kLanes; i < mine.last; i += kLanes) {
    vf score = load(x + i) * p.scale;
    if constexpr (kFixed) score *= load(key_scales + chunk_origin() + i);
    if (p.softcap > 0) score = vtanh(score / p.softcap) * p.softcap;
    if (p.alibi) score -= __builtin_convertvector(int32_t(own) - lanes_from(i), vf) * slope;
    store(x + i, score);
  }
}

}  // namespace modulm
