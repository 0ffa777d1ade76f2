"""Paged attention: code shared by its prompt and decode kernels.

A tile is BLOCK_M rows: some tokens of one row of the step, each with GROUP_TILE of the heads that
share a key head. It iterates over keys in tiles of TILE with an online softmax, with scores in
units of log 2. A head is read in two parts, A and B, each padded to a power of two: 80 is 64 and
16; a latent of 512 and a rotated part of 64 are these two. With LATENT, the values are part A of
the keys, which is not read again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from modulm_kernels_triton.kept_latents import FP8_LATENT, latent_of_token, rotated_of_token
from modulm_kernels_triton.narrow_floats import e2m1_of_pairs, e4m3_of_bytes

__all__ = ["keys_of_token", "part_of_token", "reach", "store_result", "walk"]

LOG2E = tl.constexpr(1.4426950408889634)
#: Codes of formats (cache.py): from one on, tokens have scales; from the other on, blocks do.
WITH_SCALES = tl.constexpr(3)
NVFP4 = tl.constexpr(5)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


#: What `firsts` and `ends` are (LOOK[4]): nothing; a span's first key and its end; the key from
#: which on bits of `ends` tell what is seen, or -1.
SPANS_SEEN = tl.constexpr(1)
BITS_SEEN = tl.constexpr(2)


@triton.jit
def reach(first, last, length, firsts, ends, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
          SPANS: tl.constexpr):  # fmt: skip
    """Return [low, high): keys, of `length`, that queries at `first` to `last` may attend to."""
    low = 0
    high = length
    if WINDOW > 0:
        low = tl.maximum(first - (WINDOW - 1), 0)
        if not CAUSAL:
            high = tl.minimum(length, last + WINDOW)
    if CAUSAL:
        high = tl.minimum(length, last + 1)
    if SPANS == SPANS_SEEN:
        low = tl.minimum(low, tl.min(tl.where(ends > 0, firsts, low), 0))
        high = tl.maximum(high, tl.max(ends, 0))
    if SPANS == BITS_SEEN:
        high = tl.where(tl.max(firsts, 0) >= 0, length, high)
    return low, high


@triton.jit
def _visible(at, inside, positions, firsts, ends, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
             SPANS: tl.constexpr):  # fmt: skip
    """Return [M, TILE]: whether the query at positions[m] may attend to the key at at[n]."""
    distance = positions[:, None] - at[None, :]
    seen = inside[None, :] & (positions[:, None] >= 0)
    if CAUSAL:
        seen = seen & (distance >= 0)
    if WINDOW > 0:
        seen = seen & (distance < WINDOW)
        if not CAUSAL:
            seen = seen & (distance > -WINDOW)
    if SPANS == SPANS_SEEN:
        within = (at[None, :] >= firsts[:, None]) & (at[None, :] < ends[:, None])
        seen = seen | (within & inside[None, :])
    if SPANS == BITS_SEEN:
        real = inside[None, :] & (positions[:, None] >= 0)
        new = tl.maximum(at[None, :] - firsts[:, None], 0)
        bit = (ends[:, None] >> tl.minimum(new, 62).to(tl.int64)) & 1
        marked = (at[None, :] < firsts[:, None]) | (bit == 1)
        seen = tl.where((firsts >= 0)[:, None], real & marked, seen)
    return seen


@triton.jit
def part_of_token(
    base, rows, inside, dtype: tl.constexpr, FROM: tl.constexpr, SIZE: tl.constexpr,
    PAD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return [TILE, PAD]: the cached rows' numbers from FROM on, 0 outside."""
    d = tl.arange(0, PAD)
    where = base + rows[:, None] + (FROM + d)[None, :]
    if MASKED and SIZE < PAD:
        numbers = tl.load(where, inside[:, None] & (d < SIZE)[None, :], other=0.0)
    elif MASKED:
        numbers = tl.load(where, inside[:, None], other=0.0)
    elif SIZE < PAD:
        numbers = tl.load(where, (d < SIZE)[None, :], other=0.0)
    else:
        numbers = tl.load(where)
    return numbers.to(dtype)


@triton.jit
def _nvfp4_of_token(
    base, rows, inside, dtype: tl.constexpr, REGION: tl.constexpr, NUMBERS: tl.constexpr,
    FROM: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return [TILE, PAD]: numbers from FROM on, of NUMBERS at a token's byte REGION; 0 outside."""
    pair, group = tl.arange(0, PAD // 2), tl.arange(0, PAD // 16)
    there = inside[:, None] & (pair * 2 < SIZE)[None, :]
    codes = tl.load(base + rows[:, None] + (REGION + FROM // 2 + pair)[None, :], there, other=0)
    there = inside[:, None] & (group * 16 < SIZE)[None, :]
    at = REGION + NUMBERS // 2 + FROM // 16 + group
    scale = e4m3_of_bytes(tl.load(base + rows[:, None] + at[None, :], there, other=0))
    wide = tl.broadcast_to(scale[:, :, None], (TILE, PAD // 16, 16))
    return (e2m1_of_pairs(codes) * tl.reshape(wide, (TILE, PAD))).to(dtype)


@triton.jit
def keys_of_token(
    base, rows, inside, dtype: tl.constexpr, FROM: tl.constexpr, SIZE: tl.constexpr,
    PAD: tl.constexpr, MASKED: tl.constexpr, SHAPE: tl.constexpr, CODE: tl.constexpr,
):  # fmt: skip
    """Return [TILE, PAD]: numbers of keys from FROM on, in any format."""
    if CODE >= FP8_LATENT and FROM == 0:
        numbers = latent_of_token(base, rows, inside, dtype, SHAPE[0], CODE)
    elif CODE >= FP8_LATENT:
        numbers = rotated_of_token(base, rows, inside, dtype, CODE)
    elif CODE >= NVFP4:
        numbers = _nvfp4_of_token(
            base, rows, inside, dtype, 0, SHAPE[1] + SHAPE[3], FROM, SIZE, PAD, SHAPE[0]
        )
    else:
        numbers = part_of_token(base, rows, inside, dtype, FROM, SIZE, PAD, MASKED)
    return numbers


@triton.jit
def walk(
    acc, total, most, qa, qb, positions, firsts, ends, slopes,
    cache, scales, table, begin, stop, low, high, block_stride, scale, softcap,
    MASKED: tl.constexpr, SHAPE: tl.constexpr, FORM: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Accumulate the keys [begin, stop), of which those in [low, high) exist.

    cache, scales: of the key head, in its first block. block_stride: of the cache. scale: turns
    products into scores, in units of log 2 unless LOOK transforms them further. SHAPE: (TILE, sizes
    and paddings of A, B and values, start of values, LATENT). FORM: (BLOCK_SIZE, numbers per token,
    KEPT, precision). LOOK: (CAUSAL, WINDOW, SOFTCAP, ALIBI, SPANS).
    """
    TILE: tl.constexpr = SHAPE[0]
    BLOCK_SIZE: tl.constexpr = FORM[0]
    dtype: tl.constexpr = qa.dtype
    for start in range(begin, stop, TILE):
        at = start + tl.arange(0, TILE)
        inside = (at >= low) & (at < high)
        block = tl.load(table + at // BLOCK_SIZE, inside, other=0).to(tl.int64) * block_stride
        rows = block + at % BLOCK_SIZE * FORM[1]
        ka = keys_of_token(
            cache, rows, inside, dtype, 0, SHAPE[1], SHAPE[2], MASKED, SHAPE, FORM[2]
        )
        scores = tl.dot(qa, tl.trans(ka), input_precision=FORM[3])
        if SHAPE[3] > 0:
            kb = keys_of_token(
                cache, rows, inside, dtype, SHAPE[1], SHAPE[3], SHAPE[4], MASKED, SHAPE, FORM[2]
            )
            scores = tl.dot(qb, tl.trans(kb), scores, input_precision=FORM[3])
        scores = scores * scale
        if FORM[2] >= WITH_SCALES and FORM[2] < NVFP4:
            scale_at = block // 4 + at % BLOCK_SIZE * 2
            scores = scores * tl.load(scales + scale_at, inside, other=0.0)[None, :]
        if LOOK[2]:
            scores = softcap * _tanh(scores / softcap)
        if LOOK[3]:
            scores = scores - slopes[:, None] * (positions[:, None] - at[None, :])
        if LOOK[2] or LOOK[3]:
            scores = scores * LOG2E
        if MASKED:
            seen = _visible(at, inside, positions, firsts, ends, LOOK[0], LOOK[1], LOOK[4])
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(most - base)
        most = top
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        if FORM[2] >= WITH_SCALES and FORM[2] < NVFP4:
            factor = tl.load(scales + scale_at + 1, inside, other=0.0)
            weights = weights * factor[None, :]
        if SHAPE[8]:
            v = ka
        elif FORM[2] >= NVFP4:
            v = _nvfp4_of_token(
                cache, rows, inside, dtype, SHAPE[7], SHAPE[5], 0, SHAPE[5], SHAPE[6], TILE
            )
        else:
            v = part_of_token(cache, rows, inside, dtype, SHAPE[7], SHAPE[5], SHAPE[6], MASKED)
        acc = tl.dot(weights.to(dtype), v, acc, input_precision=FORM[3])
    return acc, total, most


@triton.jit
def store_result(acc, total, out, where, real, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Write acc / total to out + where[m] for the rows that are `real`."""
    d = tl.arange(0, PAD)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    mask = real[:, None] & (d < SIZE)[None, :]
    tl.store(out + where[:, None] + d[None, :], result.to(out.dtype.element_ty), mask)
