"""Paged attention for any mix of prompts and decodes.

Rows with many new tokens are divided into tiles over their queries, each of which iterates over all
visible keys. For rows with few new tokens, the context is split into at most SPLITS pieces of equal
length, which only depends on what the row may attend to; another kernel merges their results. The
number of programs that share a row's pieces only depends on the shape of the step.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from modulm_kernels_triton.attention import (
    BITS_SEEN,
    LOG2E,
    SPANS_SEEN,
    reach,
    store_result,
    walk,
)
from modulm_kernels_triton.cache import CacheForm
from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.rates import narrow_precision
from modulm_kernels_triton.tuning import tuned

__all__ = [
    "FEW",
    "Look",
    "Work",
    "merge_pieces",
    "paged_attention",
    "queries",
    "queries_of_a_tile",
    "shape_of",
]

#: Rows with at most this many new tokens have their context split.
FEW = 8


@triton.jit
def _rows_of_tile(
    tiles, query_starts, context_lens, sinks, alibi, spans, GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr, BLOCK_M: tl.constexpr, ALIBI: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Return (row of the step, valid rows, token, head, position, first and last position, a span's
    first key and end, slope) of a tile.
    """
    step_row = tl.load(tiles + 3 * tl.program_id(0))
    first = tl.load(tiles + 3 * tl.program_id(0) + 1)
    end = tl.load(query_starts + step_row + 1)
    before = tl.load(context_lens + step_row) - end
    chunks: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    tokens: tl.constexpr = BLOCK_M // GROUP_TILE
    m = tl.arange(0, BLOCK_M)
    token = first + m // GROUP_TILE
    in_group = tl.program_id(1) % chunks * GROUP_TILE + m % GROUP_TILE
    end = tl.minimum(end, first + tokens)
    real = (token < end) & (in_group < GROUP)
    head = tl.program_id(1) // chunks * GROUP + in_group
    firsts = m * 0
    ends = m * 0
    if SPANS:
        firsts = tl.load(spans + 2 * token, real, other=0).to(tl.int32)
        ends = tl.load(spans + 2 * token + 1, real, other=0)
        if SPANS == BITS_SEEN:
            firsts = tl.where(real, firsts, -1)
    slopes = 0.0
    if ALIBI:
        slopes = tl.load(alibi + head, real, other=0.0)
    position = tl.where(real, before + token, -1)
    return (
        step_row,
        real,
        token,
        head,
        position,
        before + first,
        before + end - 1,
        firsts,
        ends,
        slopes,
    )


@triton.jit
def queries(q, token, head, real, q_token, q_head, FROM: tl.constexpr, SIZE: tl.constexpr,
            PAD: tl.constexpr):  # fmt: skip
    """Return [M, PAD]: numbers of the queries from FROM on, 0 outside."""
    d = tl.arange(0, PAD)
    where = token.to(tl.int64) * q_token + head * q_head
    mask = real[:, None] & (d < SIZE)[None, :]
    return tl.load(q + where[:, None] + (FROM + d)[None, :], mask, other=0.0)


@triton.jit
def _scales(k_scale, v_scale, kv_head, scale, scale_step, SCALED: tl.constexpr,
            BENT: tl.constexpr):  # fmt: skip
    """Return the factors of products and of results."""
    of_values = 1.0
    if SCALED:
        scale = scale * tl.load(k_scale + kv_head * scale_step)
        of_values = tl.load(v_scale + kv_head * scale_step)
    if not BENT:
        scale = scale * LOG2E
    return scale, of_values


@triton.jit(do_not_specialize=["table_row"])
def _prompt(
    q, out, cache, scales, tiles, table, query_starts, context_lens, key_lens, spans,
    sinks, alibi, k_scale, v_scale, scale, softcap, scale_step,
    q_token, q_head, out_token, out_head, table_row, block_stride, head_stride, scales_at,
    GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, BLOCK_M: tl.constexpr, SHAPE: tl.constexpr,
    FORM: tl.constexpr, LOOK: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One tile of queries against all visible keys."""
    step_row, real, token, head, pos, first, last, firsts, ends, slopes = _rows_of_tile(
        tiles, query_starts, context_lens, sinks, alibi, spans, GROUP, GROUP_TILE, BLOCK_M,
        LOOK[3], LOOK[4],
    )  # fmt: skip
    TILE: tl.constexpr = SHAPE[0]
    PAD: tl.constexpr = SHAPE[6]
    kv_head = tl.program_id(1) // ((GROUP + GROUP_TILE - 1) // GROUP_TILE)
    qa = queries(q, token, head, real, q_token, q_head, 0, SHAPE[1], SHAPE[2])
    qb = qa
    if SHAPE[3] > 0:
        qb = queries(q, token, head, real, q_token, q_head, SHAPE[1], SHAPE[3], SHAPE[4])
    low, high = reach(first, last, tl.load(key_lens + step_row), firsts, ends, LOOK[0], LOOK[1],
                      LOOK[4])  # fmt: skip
    scale, of_values = _scales(
        k_scale, v_scale, kv_head, scale, scale_step, SCALED, LOOK[2] or LOOK[3]
    )
    acc = tl.zeros([BLOCK_M, PAD], tl.float32)
    if SINKS:
        most = tl.load(sinks + head, real, other=0.0) * LOG2E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        most = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    begin = low // TILE * TILE
    full_from = begin
    full_to = high // TILE * TILE
    if LOOK[0]:
        full_to = tl.minimum(high, first + 1) // TILE * TILE
    if LOOK[1] > 0:
        full_from = (tl.maximum(last - LOOK[1] + 1, 0) + TILE - 1) // TILE * TILE
        if not LOOK[0]:
            full_to = tl.minimum(high, first + LOOK[1]) // TILE * TILE
    if LOOK[4] == SPANS_SEEN:
        full_from = tl.maximum(full_from, (low + TILE - 1) // TILE * TILE)
    if LOOK[4] == BITS_SEEN:
        least = tl.min(tl.where(firsts >= 0, firsts, high), 0)
        full_to = tl.minimum(full_to, least // TILE * TILE)
    full_to = tl.maximum(full_to, full_from)
    head_cache = cache + kv_head.to(tl.int64) * head_stride
    head_scales = scales + (kv_head.to(tl.int64) * head_stride + scales_at) // 4
    row_table = table + step_row.to(tl.int64) * table_row
    if LOOK[1] > 0:
        acc, total, most = walk(
            acc, total, most, qa, qb, pos, firsts, ends, slopes, head_cache, head_scales,
            row_table, begin, tl.minimum(full_from, high), low, high, block_stride, scale, softcap,
            True, SHAPE, FORM, LOOK,
        )  # fmt: skip
    acc, total, most = walk(
        acc, total, most, qa, qb, pos, firsts, ends, slopes, head_cache, head_scales, row_table,
        full_from, full_to, low, high, block_stride, scale, softcap, False, SHAPE, FORM, LOOK,
    )  # fmt: skip
    acc, total, most = walk(
        acc, total, most, qa, qb, pos, firsts, ends, slopes, head_cache, head_scales, row_table,
        full_to, high, low, high, block_stride, scale, softcap, True, SHAPE, FORM, LOOK,
    )  # fmt: skip
    where = token.to(tl.int64) * out_token + head * out_head
    store_result(acc * of_values, total, out, where, real, SHAPE[5], SHAPE[6])


@triton.jit(do_not_specialize=["table_row"])
def _split(
    q, out, cache, scales, tiles, table, query_starts, context_lens, key_lens, spans,
    sinks, alibi, k_scale, v_scale, scale, softcap, scale_step,
    q_token, q_head, out_token, out_head, table_row, block_stride, head_stride, scales_at,
    part, stats, counts, heads,
    GROUP: tl.constexpr, GROUP_TILE: tl.constexpr, BLOCK_M: tl.constexpr, SHAPE: tl.constexpr,
    FORM: tl.constexpr, LOOK: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Every n-th piece, for n programs, of the keys that a tile of few queries may attend to.

    part: [tokens, heads, SPLITS, values] fp32, sums of weights times values. stats: [tokens, heads,
    SPLITS, 2] fp32, the largest score and the sum of weights. counts: [tokens, heads] int32, number
    of pieces. A single piece is written to `out` directly.
    """
    step_row, real, token, head, position, first, last, firsts, ends, slopes = _rows_of_tile(
        tiles, query_starts, context_lens, sinks, alibi, spans, GROUP, GROUP_TILE, BLOCK_M,
        LOOK[3], False,
    )  # fmt: skip
    TILE: tl.constexpr = SHAPE[0]
    PAD: tl.constexpr = SHAPE[6]
    low, high = reach(first, last, tl.load(key_lens + step_row), firsts, ends, LOOK[0], LOOK[1],
                      False)  # fmt: skip
    begin = low // TILE * TILE
    each = ((high - begin + SPLITS - 1) // SPLITS + TILE - 1) // TILE * TILE
    each = tl.maximum(each, LEAST)
    count = (high - begin + each - 1) // each
    if tl.program_id(2) >= tl.maximum(count, 1):
        return
    kv_head = tl.program_id(1) // ((GROUP + GROUP_TILE - 1) // GROUP_TILE)
    qa = queries(q, token, head, real, q_token, q_head, 0, SHAPE[1], SHAPE[2])
    qb = qa
    if SHAPE[3] > 0:
        qb = queries(q, token, head, real, q_token, q_head, SHAPE[1], SHAPE[3], SHAPE[4])
    scale, of_values = _scales(
        k_scale, v_scale, kv_head, scale, scale_step, SCALED, LOOK[2] or LOOK[3]
    )
    sink = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, real, other=0.0) * LOG2E
    mine = tl.load(tiles + 3 * tl.program_id(0) + 2) + tl.arange(0, BLOCK_M) // GROUP_TILE
    mine = mine.to(tl.int64) * heads + head
    if tl.program_id(2) == 0:
        tl.store(counts + mine, count, real)
    for split in range(tl.program_id(2), count, tl.num_programs(2)):
        most = tl.where(split == 0, sink, float("-inf"))
        acc, total, most = walk(
            tl.zeros([BLOCK_M, PAD], tl.float32), tl.where(most > float("-inf"), 1.0, 0.0),
            most, qa, qb, position, firsts, ends, slopes,
            cache + kv_head.to(tl.int64) * head_stride,
            scales + (kv_head.to(tl.int64) * head_stride + scales_at) // 4,
            table + step_row.to(tl.int64) * table_row, begin + split * each,
            tl.minimum(begin + split * each + each, high), low, high, block_stride, scale, softcap,
            True, SHAPE, FORM, LOOK,
        )  # fmt: skip
        acc = acc * of_values
        if count == 1:
            where = token.to(tl.int64) * out_token + head * out_head
            store_result(acc, total, out, where, real, SHAPE[5], SHAPE[6])
        else:
            at = mine * SPLITS + split
            d = tl.arange(0, PAD)
            mask = real[:, None] & (d < SHAPE[5])[None, :]
            tl.store(part + at[:, None] * SHAPE[5] + d[None, :], acc, mask)
            tl.store(stats + 2 * at, most, real)
            tl.store(stats + 2 * at + 1, total, real)


@triton.jit
def _merge(
    part, stats, counts, tokens, out, out_token, out_head, heads,
    SIZE: tl.constexpr, PAD: tl.constexpr, SPLITS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of some heads of one token; single pieces are already done."""
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.program_id(0).to(tl.int64) * heads + head
    count = tl.load(counts + at, head < heads, other=0)
    if tl.max(count, 0) > 1:
        split = tl.arange(0, SPLITS)
        there = split[None, :] < count[:, None]
        piece = at[:, None] * SPLITS + split[None, :]
        most = tl.load(stats + 2 * piece, there, other=float("-inf"))
        total = tl.load(stats + 2 * piece + 1, there, other=0.0)
        top = tl.max(most, 1)
        weights = tl.exp2(most - tl.where(top == float("-inf"), 0.0, top)[:, None])
        d = tl.arange(0, PAD)
        real = (d < SIZE)[None, :]
        mask = there[:, :, None] & real[:, None, :]
        acc = tl.load(part + piece[:, :, None] * SIZE + d[None, None, :], mask, other=0.0)
        sums = tl.sum(total * weights, 1)
        result = tl.sum(acc * weights[:, :, None], 1) / tl.where(sums == 0.0, 1.0, sums)[:, None]
        token = tl.load(tokens + tl.program_id(0)).to(tl.int64)
        where = out + token * out_token + head[:, None] * out_head + d[None, :]
        tl.store(where, result.to(out.dtype.element_ty), (count > 1)[:, None] & real)


@frozen
class Look:
    """Masking and score options, as in `AttentionSpec`; window 0: none."""

    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    spans: bool = False


@frozen(eq=False)
class Work:
    """A step, on the device.

    block_tables: [rows, blocks] int32 with dense rows. query_starts: [rows + 1] int32.
    context_lens, key_lens: [rows] int32; key_lens counts the keys that exist. prompts, splits: [n,
    3] int32, tiles of rows with many and with few tokens: row, first token of the step, and for the
    latter the number of preceding tokens in such rows. few: [tokens of such rows] int32, their
    indices in the step. spans: [tokens, 2] int32, the keys that a prompt token sees in both
    directions, 0 and 0 if none; or int64, for tokens of rows with a mask the first of the row's
    keys that the mask is about, and a bit for each, for others -1 and 0.
    """

    block_tables: Tensor
    query_starts: Tensor
    context_lens: Tensor
    key_lens: Tensor
    prompts: Tensor
    splits: Tensor
    few: Tensor
    spans: Tensor | None = None


def _sizes(form: CacheForm, dtype: torch.dtype) -> dict[str, int]:
    """Return the keys for the table of `tuning`: head width and bits per number."""
    return {"SIZE": form.head_dim, "BITS": 8 * dtype.itemsize}


def shape_of(form: CacheForm, tile: int) -> tuple[int, ...]:
    """Return the constant SHAPE of the kernels (attention.py)."""
    size, values = form.head_dim, form.value_dim
    first = values if form.latent else max(16, 1 << (size.bit_length() - 1))
    first = min(first, size)
    pads = [max(16, power_of_two(part)) for part in (first, size - first, values)]
    return (tile, first, pads[0], size - first, pads[1], values, pads[2], form.values_at,
            int(form.latent))  # fmt: skip


def queries_of_a_tile(
    kind: str, group: int, form: CacheForm, dtype: torch.dtype
) -> tuple[int, int, dict[str, int]]:
    """Return (tokens, heads of a tile, constants) of `kind` for `group` heads per key head.

    kind: "prompt" or "split".
    """
    constants = dict(tuned(f"attention_{kind}", **_sizes(form, dtype)))
    heads = min(group, constants["BLOCK_M"])
    return constants["BLOCK_M"] // heads, heads, constants


def paged_attention(
    q: Tensor,
    cache: Tensor,
    form: CacheForm,
    work: Work,
    scale: float,
    out: Tensor,
    look: Look,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Fill out [T, heads, values] for q [T, heads, size]; the cache already holds the step's keys.

    sinks, alibi: [heads] fp32; k_scale, v_scale: [1] or [kv heads] fp32, both or none.
    """
    group = q.shape[1] // form.kv_heads
    scaled = k_scale is not None
    readable = form.readable(cache)
    scales = form.scales(cache)
    tensors = (q, out, readable, q if scales is None else scales)
    optional = [x if x is not None else q for x in (work.spans, sinks, alibi, k_scale, v_scale)]
    rows = (work.block_tables, work.query_starts, work.context_lens, work.key_lens, *optional)
    numbers = (
        scale, look.softcap, int(scaled and len(optional[3]) > 1), q.stride(0), q.stride(1),
        out.stride(0), out.stride(1), work.block_tables.stride(0), form.block, form.head,
        form.scales_at,
    )  # fmt: skip
    bent = (int(look.causal), look.window, int(look.softcap > 0), int(alibi is not None))
    shared: dict[str, Any] = {"GROUP": group, "SINKS": sinks is not None, "SCALED": scaled}
    precision = "ieee" if q.dtype == torch.float32 else narrow_precision()
    shared["FORM"] = (form.block_size, form.token, form.code, precision)
    if len(work.prompts):
        _, heads, constants = queries_of_a_tile("prompt", group, form, q.dtype)
        grid = (len(work.prompts), form.kv_heads * cut(group, heads))
        shape = shape_of(form, constants.pop("TILE"))
        launch(
            _prompt, grid, *tensors, work.prompts, *rows, *numbers, GROUP_TILE=heads, SHAPE=shape,
            LOOK=(*bent, _seen(work.spans)), **shared, **constants,
        )  # fmt: skip
    if len(work.splits):
        _, heads, constants = queries_of_a_tile("split", group, form, q.dtype)
        columns = form.kv_heads * cut(group, heads)
        programs = constants.pop("PROGRAMS")
        splits = splits_of(columns, programs)
        tokens, values = len(work.few), form.value_dim
        part = q.new_empty(tokens, q.shape[1], splits, values, dtype=torch.float32)
        stats = q.new_empty(tokens, q.shape[1], splits, 2, dtype=torch.float32)
        counts = q.new_empty(tokens, q.shape[1], dtype=torch.int32)
        shape = shape_of(form, constants.pop("TILE"))
        wanted = power_of_two(4 * programs // (len(work.splits) * columns))
        shares = min(splits, max(constants.pop("SHARES"), wanted))
        launch(
            _split, (len(work.splits), columns, shares), *tensors, work.splits, *rows, *numbers,
            part, stats, counts, q.shape[1], GROUP_TILE=heads, SHAPE=shape, LOOK=(*bent, 0),
            SPLITS=splits, **shared, **constants,
        )  # fmt: skip
        merge_pieces(part, stats, counts, work.few, out)
    return out


def _seen(spans: Tensor | None) -> int:
    """Return what `spans` is, as in attention.py."""
    return 0 if spans is None else 2 if spans.dtype == torch.int64 else 1


def merge_pieces(part: Tensor, stats: Tensor, counts: Tensor, tokens: Tensor, out: Tensor) -> None:
    """Merge the pieces of some tokens into out [T, heads, values].

    part: [n, heads, pieces, values] fp32, sums of weights times values. stats: [n, heads, pieces,
    2] fp32, the largest score and the sum of weights. counts: [n, heads] int32, number of pieces;
    a single one is not touched. tokens: [n] int32, their indices in `out`.
    """
    _, heads, splits, values = part.shape
    pad = max(16, power_of_two(values))
    merging = dict(tuned("attention_merge", SIZE=pad))
    launch(
        _merge, (len(tokens), cut(heads, merging["HEADS"])), part, stats, counts, tokens, out,
        out.stride(0), out.stride(1), heads, SIZE=values, PAD=pad, SPLITS=splits, **merging,
    )  # fmt: skip


def splits_of(columns: int, programs: int) -> int:
    """Return the maximum number of context pieces, 4 to 128, if a token has `columns` tiles of
    heads and the device runs `programs` at a time: enough for one row to fill it.
    """
    return min(128, max(4, power_of_two(cut(programs, columns))))
