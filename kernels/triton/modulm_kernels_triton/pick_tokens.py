"""The indexer of sparse attention: the cached tokens that each query selects.

One kernel scores tokens, for some tokens of the step at a time; another finds, per query, the
digits of the smallest selected score one after the other, and writes the positions of the selected
tokens in order. Nothing is read back by the host.
"""

from __future__ import annotations

import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from modulm_kernels_triton.cache import CacheForm
from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.rates import narrow_precision
from modulm_kernels_triton.tuning import tuned

__all__ = ["SparseWork", "pick_tokens"]

#: Scores that exist at a time.
_SCORES = 1 << 26


@frozen(eq=False)
class SparseWork:
    """A step, on the device, for layers that select tokens or attend to selected ones.

    block_tables: [rows, blocks] int32 with dense rows. rows, positions: [tokens] int32, of each
    token. few, many: int32, the tokens of rows with few new tokens, and of the others.
    """

    block_tables: Tensor
    rows: Tensor
    positions: Tensor
    few: Tensor
    many: Tensor


@triton.jit(do_not_specialize=["table_row", "first"])
def _score(
    q, cache, key_scales, table, rows, positions, weights, scores, first, scale, q_token, q_head,
    table_row, block_stride, scales_at, stride, heads, picks,
    SIZE: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
    TILE: tl.constexpr, RUN: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Scores of one token against a run of keys; nothing if the token selects all that it sees."""
    token = first + tl.program_id(0)
    position = tl.load(positions + token)
    begin = tl.program_id(1) * RUN
    if (begin > position) | (position < picks):
        return
    row_table = table + tl.load(rows + token).to(tl.int64) * table_row
    d = tl.arange(0, PAD)
    to = scores + tl.program_id(0).to(tl.int64) * stride
    for start in range(begin, tl.minimum(begin + RUN, position + 1), TILE):
        at = start + tl.arange(0, TILE)
        inside = at <= position
        block = tl.load(row_table + at // FORM[0], inside, other=0).to(tl.int64) * block_stride
        where = cache + (block + at % FORM[0] * FORM[1])[:, None] + d[None, :]
        k = tl.load(where, inside[:, None] & (d < SIZE)[None, :], other=0.0)
        k = tl.trans(k.to(q.dtype.element_ty))
        total = tl.zeros([TILE], tl.float32)
        for block_of_heads in tl.static_range(HEADS // BLOCK_H):
            h = block_of_heads * BLOCK_H + tl.arange(0, BLOCK_H)
            here = q + token.to(tl.int64) * q_token + h * q_head
            mask = (h < heads)[:, None] & (d < SIZE)[None, :]
            queries = tl.load(here[:, None] + d[None, :], mask, other=0.0)
            w = tl.load(weights + token.to(tl.int64) * heads + h, h < heads, other=0.0)
            products = tl.dot(queries, k, input_precision=FORM[2]) * scale
            total += tl.sum(tl.maximum(products, 0.0) * w[:, None], 0)
        if FORM[3]:  # a key's scale is positive
            scale_at = key_scales + (block + scales_at) // 4 + at % FORM[0] * 2
            total *= tl.load(scale_at, inside, other=0.0)
        tl.store(to + at, total, inside)


@triton.jit
def _ordered(x):
    """Return uint32 numbers in the order of fp32 numbers."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = bits >> 31
    return bits ^ tl.where(sign == 1, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit(do_not_specialize=["first"])
def _select(
    scores, positions, out, first, stride,
    PICKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The selection of one token; of equal scores the earlier ones."""
    token = first + tl.program_id(0)
    seen = tl.load(positions + token) + 1
    count = tl.minimum(seen, PICKS)
    to = out + token.to(tl.int64) * PICKS
    for start in range(0, PICKS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        missing = PICKS - count
        tl.store(to + at, tl.where(at < missing, -1, at - missing), at < PICKS)
    if seen <= PICKS:
        return
    row = scores + tl.program_id(0).to(tl.int64) * stride
    digits = tl.arange(0, 256)
    least = tl.full([], 0, tl.uint32)
    known = tl.full([], 0, tl.uint32)
    left = count
    for shift in tl.static_range(24, -1, -8):
        counts = tl.zeros([256], tl.int32)
        for start in range(0, seen, BLOCK):
            at = start + tl.arange(0, BLOCK)
            keys = _ordered(tl.load(row + at, at < seen, other=0.0))
            like = (at < seen) & ((keys & known) == least)
            counts += tl.histogram(((keys >> shift) & 255).to(tl.int32), 256, mask=like)
        least_so_far = tl.cumsum(counts, 0, reverse=True)
        found = tl.sum((least_so_far >= left).to(tl.int32), 0) - 1
        left = left - tl.sum(tl.where(digits > found, counts, 0), 0)
        least = least | (found.to(tl.uint32) << shift)
        known = known | (tl.full([], 255, tl.uint32) << shift)
    written = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for start in range(0, seen, BLOCK):
        at = start + tl.arange(0, BLOCK)
        keys = _ordered(tl.load(row + at, at < seen, other=0.0))
        same = (at < seen) & (keys == least)
        order = equal + tl.cumsum(same.to(tl.int32), 0)
        taken = ((at < seen) & (keys > least)) | (same & (order <= left))
        place = written + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(to + place, at, taken)
        written += tl.sum(taken.to(tl.int32), 0)
        equal += tl.sum(same.to(tl.int32), 0)


def pick_tokens(
    q: Tensor,
    cache: Tensor,
    form: CacheForm,
    work: SparseWork,
    scale: float,
    head_weights: Tensor,
    out: Tensor,
) -> Tensor:
    """Fill out [T, 1, picks] int32 for q [T, heads, size], see `AttentionSpec.picks`.

    The cache holds keys only (a latent form). head_weights: [T, heads] fp32, contiguous.
    """
    tokens, heads, size = q.shape
    picks = out.shape[-1]
    longest = work.block_tables.shape[1] * form.block_size
    constants = dict(tuned("pick_scores", SIZE=size, BITS=8 * q.dtype.itemsize))
    selecting = dict(tuned("pick_select"))
    run = constants["RUN"]
    width = max(16, power_of_two(heads))
    constants["BLOCK_H"] = min(width, constants["BLOCK_H"])
    stride = longest if longest > picks else 0
    some = max(1, _SCORES // max(stride, 1))
    scores = head_weights.new_empty(min(some, tokens) * stride)
    precision = "ieee" if q.dtype.itemsize == 4 else narrow_precision()
    key_scales = form.scales(cache)
    for first in range(0, tokens, some):
        here = min(some, tokens - first)
        if stride:
            launch(
                _score, (here, cut(longest, run)), q, form.readable(cache),
                q if key_scales is None else key_scales, work.block_tables, work.rows,
                work.positions, head_weights, scores, first, scale, q.stride(0), q.stride(1),
                work.block_tables.stride(0), form.block, form.scales_at, stride, heads, picks,
                SIZE=size, PAD=max(16, power_of_two(size)), HEADS=width,
                FORM=(form.block_size, form.token, precision, form.has_scales), **constants,
            )  # fmt: skip
        launch(
            _select, (here,), scores, work.positions, out, first, stride, PICKS=picks, **selecting
        )
    return out
