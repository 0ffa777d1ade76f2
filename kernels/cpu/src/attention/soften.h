// Scores of a group of rows in a chunk to weights: members of Walk.
#pragma once

#include "attention/walk.h"

namespace modulm {

// Whether every row sees all of the chunk, and its scores are products.
template <class Math>
bool Walk<Math>::whole() const {
  const int64_t from = chunk_origin();
  return p.plain_scores() && !(masked && origin + chunk.high > base) &&
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
  if (tile.rows <= kFewRows || p.cache.latent || !from_start()) return false;
  const int rows = group_rows();
  const bool cut = fresh || !whole();
  const Line* const* pieces = keys + chunk.low / kPiece;
  alignas(64) float all[kGroupRows * 2 * kLanes];
  Direct part{nullptr, nullptr, attention_lines<Math>(p.size, lines),
              Math::in_place(p.cache) ? p.cache.block : kPiece, p.scale * kLog2E, false, fresh, 0};
  DirectRows at{queries + group * query_stride, query_stride, state.peak + group, bounds,
                chunk.low, weights, kWeightStride, all};
  for (int64_t left = chunk.high - chunk.low; left > 0; left -= 2 * kPiece, pieces += 2) {
    const int columns = int(std::min<int64_t>(left, 2 * kPiece));
    part.first = pieces[0], part.second = columns > kPiece ? pieces[1] : nullptr;
    direct_tiles(part, at, rows, columns, cut);
    part.continues = true, part.peaks = false, part.column += columns;
    at.weights += columns;
  }
  if (add_totals(all)) return true;
  if (fresh) std::fill_n(state.peak + group, rows, kNever);
  return false;
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
  const int rows = group_rows();
  const bool all = whole();
  if (kFixed && all) share_out({0, kChunk});
  for (int i = 0; i < rows; i++) {
    if (kFixed && turns) upcoming.fetch<kRowBurst>();
    if (all) soften_row<true>(i, {0, kChunk}, p.scale * kLog2E, state);
    else soften_seen(i, state);
  }
}

// One row that may not see all of the chunk.
template <class Math>
void Walk<Math>::soften_seen(int i, const State& state) {
  const int64_t from = chunk_origin();
  const Columns all{chunk.low - from, chunk.high - from};
  const Columns mine{std::max(bounds[i].first - from, all.first),
                     std::min(bounds[i].last - from, all.last)};
  Weight* row = weights + kPlanes * i * kWeightStride;
  if (mine.none()) {
    if constexpr (kFixed) value_units[i] = 0.0f;
    return clear_weights(row, all.first, all.last);
  }
  if (!p.plain_scores()) finish_scores(i, mine);
  if (masked && origin + chunk.high > base) hide_scores(i, mine);
  soften_row<false>(i, mine, p.plain_scores() ? p.scale * kLog2E : kLog2E, state);
  clear_weights(row, all.first, std::min(weights_begin(mine), all.last));
  clear_weights(row, std::max(weights_end(mine), all.first), all.last);
}

// One row. Weights are relative to the highest score of the first piece until later ones become large:
// bf16 and fp32 are as precise above 1 as below.
template <class Math>
template <bool Whole>
void Walk<Math>::soften_row(int i, Columns mine, float unit, const State& state) {
  const float* x = chunk_scores(i);
  if constexpr (kFixed) {
    soften_planes<Whole>(i, mine, row_peak(x, mine), state);
  } else {
    const int r = group + i;
    Weight* to = weights + i * kWeightStride;
    auto raised = [&](Columns among) {
      raise(i, row_peak(x, among) * unit, state);
      if (state.peak[r] == kNever) clear_weights(to, weights_begin(mine), weights_end(mine));
      return state.peak[r] > kNever;
    };
    const Columns first{mine.first, std::min(mine.last, mine.first / kPiece * kPiece + kPiece)};
    if (state.peak[r] == kNever && !raised(first) && !raised(mine)) return;
    vf total = row_weights<Math, Whole>(x, mine, unit, state.peak[r], to);
    if (any_beyond(total, kLarge)) {
      if (!raised(mine)) return;
      total = row_weights<Math, Whole>(x, mine, unit, state.peak[r], to);
    }
    store(totals + i * kLanes, load(totals + i * kLanes) + total);
  }
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

// Transformations of scores other than a constant factor: the softcap, distances. In fixed point,
// scores have their factor, and get the unit of log2 here.
template <class Math>
void Walk<Math>::finish_scores(int row, Columns mine) const {
  const int r = group + row;
  float* x = chunk_scores(row);
  const float slope = p.alibi ? p.alibi[query_head(r)] : 0.0f;
  const int64_t own = base + token(r) - origin - chunk_origin();
  for (int64_t i = mine.first / kLanes * kLanes; i < mine.last; i += kLanes) {
    vf score = load(x + i);
    if constexpr (!kFixed) score *= p.scale;
    if (p.softcap > 0) score = vtanh(score / p.softcap) * p.softcap;
    if (p.alibi) score -= __builtin_convertvector(int32_t(own) - lanes_from(i), vf) * slope;
    store(x + i, kFixed ? score * kLog2E : score);
  }
}

}  // namespace modulm
