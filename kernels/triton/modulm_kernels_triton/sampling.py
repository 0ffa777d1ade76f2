"""Sampling: one program per row, which reads its logits a few times without sorting.

min-p, top-k and top-p keep the logits at or above a threshold. The threshold is found by bisection
over the bits of floats: among the few logits near the best one if they suffice, else over the whole
row. Sums are fp64, of weights e^(x - best) in fp32, in an order that does not depend on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.weights import need

__all__ = ["OPS"]

_BLOCK = 4096
#: Number of logits near the best one that are examined without reading the row again.
_CANDIDATES = 2048


@triton.jit
def _scaled(row, at, size, heat):
    return tl.load(row + at, at < size, other=float("-inf")).to(tl.float32) / heat


@triton.jit
def _order(x):
    """Map floats to integers in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _float(order):
    low = order.to(tl.int32)
    return (low ^ ((low >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(row, size, heat, BLOCK: tl.constexpr):
    """Return (the maximum of a row, the first index that has it, -1 if it is not finite)."""
    value = tl.full((BLOCK,), float("-inf"), tl.float32)
    index = tl.zeros((BLOCK,), tl.int32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _scaled(row, at, size, heat)
        broken |= (x != x).to(tl.int32)
        index = tl.where(x > value, at, index)
        value = tl.where(x > value, x, value)
    peak = tl.max(value, 0)
    first = tl.min(tl.where(value == peak, index, size), 0)
    bad = (tl.max(broken, 0) > 0) | (peak == float("inf")) | (peak == float("-inf"))
    return peak, tl.where(bad, -1, first).to(tl.int64)


@triton.jit
def _mass(x, peak, lowest):
    """Return the fp64 weights of logits at or above `lowest`."""
    return tl.where(x >= lowest, tl.exp(x - peak), 0.0).to(tl.float64)


@triton.jit
def _row_count(row, size, heat, lowest, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, size, BLOCK):
        x = _scaled(row, start + tl.arange(0, BLOCK), size, heat)
        total += (x >= lowest).to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _row_mass(row, size, heat, peak, lowest, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, size, BLOCK):
        x = _scaled(row, start + tl.arange(0, BLOCK), size, heat)
        total += _mass(x, peak, lowest)
    return tl.sum(total, 0)


@triton.jit
def _gather(row, size, heat, lowest, few, BLOCK: tl.constexpr, MOST: tl.constexpr):
    """Copy the logits at or above `lowest` to `few`, in order; return their number."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, size, BLOCK):
        x = _scaled(row, start + tl.arange(0, BLOCK), size, heat)
        selected = (x >= lowest).to(tl.int32)
        target = count + tl.cumsum(selected, 0) - selected
        tl.store(few + target, x, (selected > 0) & (target < MOST))
        count += tl.sum(selected, 0)
    return count


@triton.jit
def _near(
    row, size, heat, peak, floor, k, p, total, few, BLOCK: tl.constexpr, MOST: tl.constexpr
):  # fmt: skip
    """Return (number of logits in `few`, 1 if they suffice, else 0)."""
    count, enough = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    step = tl.full((), 0, tl.int32)
    while (step < 3) & (count <= MOST) & (enough == 0):
        span = tl.where(step == 0, 2.0, tl.where(step == 1, 6.0, 16.0))
        lowest = tl.maximum(peak - span, floor)
        count = _gather(row, size, heat, lowest, few, BLOCK, MOST)
        tl.debug_barrier()
        if count <= MOST:
            index = tl.arange(0, MOST)
            x = tl.load(few + index, index < count, other=float("-inf"))
            reached = tl.sum(_mass(x, peak, lowest), 0) >= p.to(tl.float64) * total
            by_mass = (k == 0) & (floor == float("-inf")) & reached
            enough = ((lowest == floor) | ((k > 0) & (count >= k)) | by_mass).to(tl.int32)
        step += 1
    return count, enough


@triton.jit
def _floor(
    row, size, heat, peak, k, p, share, few, BLOCK: tl.constexpr, MOST: tl.constexpr
):  # fmt: skip
    """Return the smallest logit that min-p, top-k and top-p keep, -inf if they are all off."""
    floor = peak * 0.0 + float("-inf")
    if share > 0:
        floor = peak + tl.log(share)
    if (k > 0) | (p < 1.0):
        total = tl.full((), 0.0, tl.float64)
        if (k == 0) & (share <= 0):
            total = _row_mass(row, size, heat, peak, float("-inf"), BLOCK)
        count_near, enough = _near(row, size, heat, peak, floor, k, p, total, few, BLOCK, MOST)
        index = tl.arange(0, MOST)
        x = tl.load(few + index, (index < count_near) & (enough > 0), other=float("-inf"))
        lowest, above = tl.full((), -2139095041, tl.int64), _order(peak) + 1
        if k > 0:
            low, high = lowest, above
            while high - low > 1:
                middle = (low + high) >> 1
                bound = tl.maximum(_float(middle), floor)
                if enough > 0:
                    count = tl.sum((x >= bound).to(tl.int32), 0)
                else:
                    count = _row_count(row, size, heat, bound, BLOCK)
                if count >= k:
                    low = middle
                else:
                    high = middle
            if low > lowest:
                floor = tl.maximum(floor, _float(low))
        if p < 1.0:
            if (k > 0) | (share > 0):
                if enough > 0:
                    total = tl.sum(_mass(x, peak, floor), 0)
                else:
                    total = _row_mass(row, size, heat, peak, floor, BLOCK)
            wanted = p.to(tl.float64) * total
            low, high = lowest, above
            while high - low > 1:
                middle = (low + high) >> 1
                bound = tl.maximum(_float(middle), floor)
                if enough > 0:
                    mass = tl.sum(_mass(x, peak, bound), 0)
                else:
                    mass = _row_mass(row, size, heat, peak, bound, BLOCK)
                if mass >= wanted:
                    low = middle
                else:
                    high = middle
            if low > lowest:
                floor = tl.maximum(floor, _float(low))
    return floor


@triton.jit
def _argmax(logits, row_stride, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, first = _best(logits + row * row_stride, size, 1.0, BLOCK)
    tl.store(out + row, first)


@triton.jit
def _sample(
    logits, row_stride, temperature, top_k, top_p, min_p, uniform, few, out, size,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    row_index = tl.program_id(0)
    row = logits + row_index.to(tl.int64) * row_stride
    heat = tl.load(temperature + row_index)
    peak, chosen = _best(row, size, tl.where(heat > 0, heat, 1.0), BLOCK)
    if (heat > 0) & (chosen >= 0):
        floor = peak * 0.0 + float("-inf")
        if TOP_K or TOP_P or MIN_P:
            k = tl.minimum(tl.load(top_k + row_index), size) if TOP_K else tl.full((), 0, tl.int32)
            p = tl.load(top_p + row_index) if TOP_P else peak * 0.0 + 1.0
            share = tl.load(min_p + row_index) if MIN_P else peak * 0.0
            floor = _floor(row, size, heat, peak, k, p, share, few + row_index * MOST, BLOCK, MOST)
        total = _row_mass(row, size, heat, peak, floor, BLOCK)
        target = tl.load(uniform + row_index) * total
        before = tl.full((), 0.0, tl.float64)
        start, drawn = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32) + size
        while (start < size) & (drawn == size):
            at = start + tl.arange(0, BLOCK)
            x = _scaled(row, at, size, heat)
            weights = _mass(x, peak, floor)
            whole = tl.sum(weights, 0)
            if before + whole > target:
                running = before + tl.cumsum(weights, 0)
                drawn = tl.min(tl.where((running > target) & (x >= floor), at, size), 0)
            # Fallback to the last kept token, in case the sums were rounded differently.
            last = tl.max(tl.where((weights > 0) & (at < size), at, -1), 0)
            chosen = tl.where(last >= 0, last.to(tl.int64), chosen)
            before += whole
            start += BLOCK
        chosen = tl.where(drawn < size, drawn.to(tl.int64), chosen)
    tl.store(out + row_index, chosen)


@triton.jit
def _filter(
    logits, row_stride, temperature, top_k, top_p, min_p, few, out, size, BLOCK: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    row_index = tl.program_id(0)
    row = logits + row_index.to(tl.int64) * row_stride
    heat = tl.load(temperature + row_index)
    peak, first = _best(row, size, heat, BLOCK)
    floor = peak * 0.0 + float("-inf")
    if first >= 0:
        k = tl.minimum(tl.load(top_k + row_index), size)
        p, share = tl.load(top_p + row_index), tl.load(min_p + row_index)
        floor = _floor(row, size, heat, peak, k, p, share, few + row_index * MOST, BLOCK, MOST)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _scaled(row, at, size, heat)
        filtered = tl.where(x < floor, float("-inf"), x)
        tl.store(out + row_index.to(tl.int64) * size + at, filtered, at < size)


@triton.jit(do_not_specialize=["size"])
def _penalise(
    logits, row_stride, places, ids, counts, repetition, frequency, presence, size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    where = tl.load(places + at, inside, other=0) * row_stride + tl.load(ids + at, inside, other=0)
    x = tl.load(logits + where, inside, other=0.0)
    factor = tl.load(repetition + at, inside, other=1.0)
    count = tl.load(counts + at, inside, other=0.0)
    x = tl.where(x > 0, x / factor, x * factor)
    x -= tl.load(frequency + at, inside, other=0.0) * count
    x -= tl.load(presence + at, inside, other=0.0) * (count > 0).to(tl.float32)
    tl.store(logits + where, x, inside)


@triton.jit
def _bar(logits, row_stride, places, mask, mask_row, size, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    word = tl.load(mask + entry * mask_row + at // 32, inside, other=0)
    barred = ((word >> (at % 32)) & 1) == 0
    row = tl.load(places + entry) * row_stride
    nothing = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(logits + row + at, nothing.to(logits.dtype.element_ty), inside & barred)


@triton.jit
def _measure(
    values, row_stride, chosen, chosen_value, rank, shift, size, NORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the chosen token's value and rank, and the shift of values."""
    row_index = tl.program_id(0).to(tl.int64)
    row = values + row_index * row_stride
    mine = tl.load(row + tl.load(chosen + row_index)).to(tl.float32)
    better = _count_above(row, size, mine, BLOCK)
    offset = mine * 0.0
    if NORMALISE:
        peak, _ = _best(row, size, 1.0, BLOCK)
        total = _row_mass(row, size, 1.0, peak, float("-inf"), BLOCK)
        offset = peak + tl.log(total.to(tl.float32))
    tl.store(chosen_value + row_index, mine - offset)
    tl.store(rank + row_index, better.to(tl.int64) + 1)
    tl.store(shift + row_index, offset)


@triton.jit
def _count_above(row, size, bound, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, size, BLOCK):
        x = _scaled(row, start + tl.arange(0, BLOCK), size, 1.0)
        total += (x > bound).to(tl.int32)
    return tl.sum(total, 0)


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """Return (x with dense rows, rows, size)."""
    rows, size = x.shape
    need(size > 0, "logits must have a vocabulary")
    return (x if x.stride(1) == 1 else x.contiguous()), rows, size


def _block(size: int) -> dict[str, int]:
    return {"BLOCK": min(_BLOCK, power_of_two(size)), "num_warps": 16 if size > 1024 else 4}


def argmax(logits: Tensor) -> Tensor:
    """The op `argmax`."""
    logits, rows, size = _rows(logits)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    launch(_argmax, (rows,), logits, logits.stride(0), out, size, **_block(size))
    return out


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    uniform: Tensor,
) -> Tensor:
    """The ops `sample` and `sample_blind`; filters may be None if they are off for all rows."""
    logits, rows, size = _rows(logits)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    filters = (top_k, top_p, min_p)
    some = any(each is not None for each in filters)
    few = torch.empty(rows, _CANDIDATES, device=logits.device) if some else temperature
    launch(
        _sample, (rows,), logits, logits.stride(0), temperature,
        *(temperature if each is None else each for each in filters), uniform, few, out, size,
        TOP_K=top_k is not None, TOP_P=top_p is not None, MIN_P=min_p is not None,
        MOST=_CANDIDATES, **_block(size),
    )  # fmt: skip
    return out


def filter_logits(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """The op `filter_logits`, without reading values on the host."""
    logits, rows, size = _rows(logits)
    out = torch.empty(rows, size, device=logits.device)
    few = torch.empty(rows, _CANDIDATES, device=logits.device)
    launch(
        _filter, (rows,), logits, logits.stride(0), temperature, top_k, top_p, min_p, few, out,
        size, MOST=_CANDIDATES, **_block(size),
    )  # fmt: skip
    return out


def apply_penalties(
    logits: Tensor,
    indices: Tensor,
    ids: Tensor,
    counts: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """The op `apply_penalties`."""
    size = indices.shape[0]
    launch(
        _penalise, (cut(size, 256),), logits, logits.stride(0), indices, ids, counts, repetition,
        frequency, presence, size, BLOCK=256,
    )  # fmt: skip


def apply_bitmask(logits: Tensor, indices: Tensor, mask: Tensor) -> None:
    """The op `apply_bitmask`."""
    size, wanted = logits.shape[1], cut(logits.shape[1], 32)
    fits = mask.shape[0] == indices.shape[0] and mask.shape[1] >= wanted and mask.stride(1) == 1
    need(fits, f"mask must be [{indices.shape[0]}, {wanted}], not {list(mask.shape)}")
    launch(
        _bar, (indices.shape[0], cut(size, 1024)), logits, logits.stride(0), indices, mask,
        mask.stride(0), size, BLOCK=1024,
    )  # fmt: skip


def top_logprobs(
    values: Tensor, chosen: Tensor, k: int, normalise: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """The op `top_logprobs`; torch finds the k largest."""
    values, rows, size = _rows(values)
    chosen_values, shift = torch.empty(2, rows, device=values.device)
    rank = torch.empty(rows, dtype=torch.int64, device=values.device)
    launch(
        _measure, (rows,), values, values.stride(0), chosen, chosen_values, rank, shift, size,
        NORMALISE=normalise, **_block(size),
    )  # fmt: skip
    best, ids = values.topk(min(k, size), dim=-1)
    best = best - shift[:, None] if normalise else best
    return torch.cat([chosen[:, None], ids], 1), torch.cat([chosen_values[:, None], best], 1), rank


OPS = {
    "apply_bitmask": apply_bitmask,
    "apply_penalties": apply_penalties,
    "argmax": argmax,
    "filter_logits": filter_logits,
    "sample": sample,
    "sample_blind": sample,
    "top_logprobs": top_logprobs,
}
