"""Attention of each token to selected tokens of a latent cache.

A program takes a token and some of its heads, which all attend to the same tokens. For rows with
few new tokens, the selection is divided into pieces, which another kernel merges, as in
paged_attention.py; the number of pieces depends on the size of a selection only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.attention import LOG2E, keys_of_token, store_result
from modulm_kernels_triton.cache import CacheForm
from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.paged_attention import merge_pieces, queries, shape_of
from modulm_kernels_triton.pick_tokens import SparseWork
from modulm_kernels_triton.rates import narrow_precision
from modulm_kernels_triton.tuning import tuned

__all__ = ["selected_attention"]


@triton.jit(do_not_specialize=["table_row"])
def _selected(
    q, out, cache, tokens, table, rows, positions, selected, k_scale, v_scale, scale,
    q_token, q_head, out_token, out_head, table_row, block_stride, heads, part, stats, counts,
    PICKS: tl.constexpr, BLOCK_M: tl.constexpr, SHAPE: tl.constexpr, FORM: tl.constexpr,
    SCALED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One token and BLOCK_M heads against one of SPLITS pieces of the selection.

    part, stats, counts: as in `paged_attention._split`, unless there is one piece. SHAPE, FORM: as
    in `attention.walk`.
    """
    TILE: tl.constexpr = SHAPE[0]
    PAD: tl.constexpr = SHAPE[6]
    EACH: tl.constexpr = (PICKS + SPLITS * TILE - 1) // (SPLITS * TILE) * TILE
    token = tl.load(tokens + tl.program_id(0))
    head = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = head < heads
    each = token + tl.zeros([BLOCK_M], tl.int32)
    qa = queries(q, each, head, real, q_token, q_head, 0, SHAPE[1], SHAPE[2])
    qb = qa
    if SHAPE[3] > 0:
        qb = queries(q, each, head, real, q_token, q_head, SHAPE[1], SHAPE[3], SHAPE[4])
    of_values = 1.0
    scale = scale * LOG2E
    if SCALED:
        scale = scale * tl.load(k_scale)
        of_values = tl.load(v_scale)
    position = tl.load(positions + token)
    row_table = table + tl.load(rows + token).to(tl.int64) * table_row
    chosen = selected + token.to(tl.int64) * PICKS
    dtype: tl.constexpr = q.dtype.element_ty
    acc = tl.zeros([BLOCK_M, PAD], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    begin = tl.program_id(2) * EACH
    for start in range(begin, tl.minimum(begin + EACH, PICKS), TILE):
        index = start + tl.arange(0, TILE)
        at = tl.load(chosen + index, index < PICKS, other=-1)
        seen = (at >= 0) & (at <= position)
        at = tl.where(seen, at, 0)
        block = tl.load(row_table + at // FORM[0], seen, other=0).to(tl.int64) * block_stride
        where = block + at % FORM[0] * FORM[1]
        ka = keys_of_token(cache, where, seen, dtype, 0, SHAPE[1], SHAPE[2], True, SHAPE, FORM[2])
        scores = tl.dot(qa, tl.trans(ka), input_precision=FORM[3])
        if SHAPE[3] > 0:
            kb = keys_of_token(
                cache, where, seen, dtype, SHAPE[1], SHAPE[3], SHAPE[4], True, SHAPE, FORM[2]
            )
            scores = tl.dot(qb, tl.trans(kb), scores, input_precision=FORM[3])
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))
        top = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(most - base)
        most = top
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(dtype), ka, acc * fade[:, None], input_precision=FORM[3])
    acc = acc * of_values
    if SPLITS == 1:
        where_out = each.to(tl.int64) * out_token + head * out_head
        store_result(acc, total, out, where_out, real, SHAPE[5], SHAPE[6])
    else:
        mine = tl.program_id(0).to(tl.int64) * heads + head
        if tl.program_id(2) == 0:
            tl.store(counts + mine, SPLITS + tl.zeros([BLOCK_M], tl.int32), real)
        place = mine * SPLITS + tl.program_id(2)
        d = tl.arange(0, PAD)
        mask = real[:, None] & (d < SHAPE[5])[None, :]
        tl.store(part + place[:, None] * SHAPE[5] + d[None, :], acc, mask)
        tl.store(stats + 2 * place, most, real)
        tl.store(stats + 2 * place + 1, total, real)


def selected_attention(
    q: Tensor,
    cache: Tensor,
    form: CacheForm,
    work: SparseWork,
    scale: float,
    selected: Tensor,
    out: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Fill out [T, heads, latent] for q [T, heads, size] and a latent cache.

    selected: [T, 1, n] int32, contiguous; positions in the token's row, -1 for none, others differ.
    k_scale, v_scale: [1] fp32, both or none.
    """
    heads, picks, values = q.shape[1], selected.shape[-1], form.value_dim
    constants = dict(tuned("attention_selected", SIZE=form.head_dim, BITS=8 * q.dtype.itemsize))
    pieces = min(constants.pop("SPLITS"), power_of_two(cut(picks, constants["TILE"])))
    shape = shape_of(form, constants.pop("TILE"))
    precision = "ieee" if q.dtype.itemsize == 4 else narrow_precision()
    optional = [q if x is None else x for x in (k_scale, v_scale)]
    for tokens, splits in ((work.few, pieces), (work.many, 1)):
        count = len(tokens) if splits > 1 else 0
        part, stats = (
            q.new_empty(count, heads, splits, each, dtype=torch.float32) for each in (values, 2)
        )
        counts = tokens.new_empty(count, heads)
        launch(
            _selected, (len(tokens), cut(heads, constants["BLOCK_M"]), splits), q, out,
            form.readable(cache), tokens, work.block_tables, work.rows, work.positions, selected,
            *optional, scale, q.stride(0), q.stride(1), out.stride(0), out.stride(1),
            work.block_tables.stride(0), form.block, heads, part, stats, counts, PICKS=picks,
            SHAPE=shape, FORM=(form.block_size, form.token, form.code, precision),
            SCALED=k_scale is not None, SPLITS=splits, **constants,
        )  # fmt: skip
        if splits > 1:
            merge_pieces(part, stats, counts, tokens, out)
    return out
