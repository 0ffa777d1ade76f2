"""Selective scan: token by token; in segments as matrix products if a head has one decay; else in
segments as a parallel scan over their tokens.

Rows with one token always use the first kernel, so their results do not depend on other rows.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from modulm.contracts.model import StatePlan
from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.rates import decays, precision, softplus
from modulm_kernels_triton.segments import SEGMENT, dense, fresh, segments, sources
from modulm_kernels_triton.tuning import tuned
from modulm_kernels_triton.weights import need

__all__ = ["OPS"]


@triton.jit
def _step_size(step, bias, low, high, BIAS: tl.constexpr):
    wide = step.to(tl.float32)
    if BIAS:
        wide += bias
    return tl.minimum(tl.maximum(softplus(wide), low), high)


@triton.jit
def _token(state, drive, dt, a, b, c):
    """Process one token: state [BC, BS]; drive, dt: [BC]; a, b, c: [BC, BS] -> (state, [BC])."""
    state = state * tl.exp(dt[:, None] * a) + drive[:, None] * b
    return state, tl.sum(state * c, 1)


@triton.jit
def _by_token(
    x, x_row, step, step_row, a_log, b, b_row, c, c_row, skip, bias, states, source, slots, fresh,
    starts, bounds, pieces, out, channels, dim, size, each, low, high,
    PACES: tl.constexpr, BIAS: tl.constexpr, PIECES: tl.constexpr, SINGLE: tl.constexpr,
    BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Process BC of a row's channels [heads * dim].

    each: heads per group. SINGLE: only rows with one token. PIECES: intermediate states may be
    kept.
    """
    row = tl.program_id(0)
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    if (last - first == 1) or (not SINGLE):
        channel = tl.program_id(1) * BC + tl.arange(0, BC)
        index = tl.arange(0, BS)
        inside = channel < channels
        head = channel // dim
        pair = inside[:, None] & (index < size)[None, :]
        where = channel[:, None].to(tl.int64) * size + index[None, :]
        new = tl.load(fresh + row)
        base = states + tl.load(source + row) * channels * size
        state = tl.load(base + where, pair & (new == 0), other=0.0)
        if PACES == 1:
            a = -tl.exp(tl.load(a_log + head, inside, other=0.0))[:, None]
        else:
            a = -tl.exp(tl.load(a_log + head[:, None] * size + index[None, :], pair, other=0.0))
        more = tl.load(skip + head, inside, other=0.0)
        added = tl.load(bias + head, inside, other=0.0) if BIAS else more
        shared = (head // each)[:, None] * size + index[None, :]
        begin, end = 0, 1
        if PIECES:
            begin, end = tl.load(bounds + row), tl.load(bounds + row + 1)
        for piece in range(begin, end):
            at, stop = first, last
            if PIECES:
                at = tl.load(pieces + piece * 3)
                stop = at + tl.load(pieces + piece * 3 + 1)
            for t in range(at, stop):
                token = tl.full((), 0, tl.int64) + t
                now = tl.load(x + token * x_row + channel, inside, other=0.0).to(tl.float32)
                step_size = tl.load(step + token * step_row + head, inside, other=0.0)
                dt = _step_size(step_size, added, low, high, BIAS)
                here = tl.load(b + token * b_row + shared, pair, other=0.0).to(tl.float32)
                there = tl.load(c + token * c_row + shared, pair, other=0.0).to(tl.float32)
                state, y = _token(state, now * dt, dt, a, here, there)
                tl.store(out + token * channels + channel, y + more * now, inside)
            if PIECES:
                slot = tl.load(pieces + piece * 3 + 2).to(tl.int64)
                if slot >= 0:
                    tl.store(states + slot * channels * size + where, state, pair)
        tl.store(states + tl.load(slots + row) * channels * size + where, state, pair)


@triton.jit
def _by_segment(
    x, x_row, step, step_row, a_log, b, b_row, c, c_row, skip, bias, states, source, slots, fresh,
    starts, bounds, pieces, out, heads, dim, size, each, low, high,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, SEGMENT: tl.constexpr, BD: tl.constexpr,
    BS: tl.constexpr,
):  # fmt: skip
    """Process BD numbers of a head of a row with several tokens; state: [BD, BS]."""
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(starts + row + 1) - tl.load(starts + row) > 1:
        d, index, ramp = (
            tl.program_id(2) * BD + tl.arange(0, BD), tl.arange(0, BS), tl.arange(0, SEGMENT)
        )  # fmt: skip
        channel = head * dim + d
        pair = (d < dim)[:, None] & (index < size)[None, :]
        where = channel[:, None].to(tl.int64) * size + index[None, :]
        wide = (head * 0 + heads).to(tl.int64) * dim * size
        new = tl.load(fresh + row)
        base = states + tl.load(source + row) * wide
        state = tl.load(base + where, pair & (new == 0), other=0.0)
        a = -tl.exp(tl.load(a_log + head))
        more = tl.load(skip + head)
        added = tl.load(bias + head) if BIAS else more
        group = head // each * size
        for piece in range(tl.load(bounds + row), tl.load(bounds + row + 1)):
            at = tl.load(pieces + piece * 3).to(tl.int64)
            count = tl.load(pieces + piece * 3 + 1)
            if count == 1:
                now = tl.load(x + at * x_row + channel, d < dim, other=0.0).to(tl.float32)
                dt = _step_size(tl.load(step + at * step_row + head), added, low, high, BIAS)
                here = tl.load(b + at * b_row + group + index, index < size, other=0.0)
                there = tl.load(c + at * c_row + group + index, index < size, other=0.0)
                state = state * tl.exp(dt * a) + (now * dt)[:, None] * here.to(tl.float32)[None, :]
                y = tl.sum(state * there.to(tl.float32)[None, :], 1)
                tl.store(out + at * heads * dim + channel, y + more * now, d < dim)
            elif count > 1:
                token, known = at + ramp, ramp < count
                dims = known[:, None] & (d < dim)[None, :]
                sizes = known[:, None] & (index < size)[None, :]
                now = tl.load(x + token[:, None] * x_row + channel[None, :], dims, other=0.0)
                now = now.to(tl.float32)
                step_size = tl.load(step + token * step_row + head, known, other=0.0)
                dt = tl.where(known, _step_size(step_size, added, low, high, BIAS), 0.0)
                b_at = b + token[:, None] * b_row + group + index[None, :]
                c_at = c + token[:, None] * c_row + group + index[None, :]
                here = tl.load(b_at, sizes, other=0.0).to(tl.float32)
                there = tl.load(c_at, sizes, other=0.0).to(tl.float32)
                total = tl.cumsum(dt * a, 0)
                drive = now * dt[:, None]
                mixed = tl.dot(there, tl.trans(here), input_precision=PRECISION)
                mixed *= decays(total, SEGMENT)
                y = tl.dot(there, tl.trans(state), input_precision=PRECISION)
                y = y * tl.exp(total)[:, None]
                y = tl.dot(mixed, drive, y, input_precision=PRECISION)
                whole = tl.sum(dt * a, 0)
                left = tl.exp(whole - total)
                state = state * tl.exp(whole)
                state = tl.dot(
                    tl.trans(drive * left[:, None]), here, state, input_precision=PRECISION
                )
                to = out + token[:, None] * heads * dim + channel[None, :]
                tl.store(to, y + more * now, dims)
            slot = tl.load(pieces + piece * 3 + 2).to(tl.int64)
            if slot >= 0:
                tl.store(states + slot * wide + where, state, pair)
        tl.store(states + tl.load(slots + row) * wide + where, state, pair)


@triton.jit
def _after(decay, drive, next_decay, next_drive):
    """Combine two runs of tokens: state -> decay * state + drive."""
    return decay * next_decay, drive * next_decay + next_drive


@triton.jit
def _by_scan(
    x, x_row, step, step_row, a_log, b, b_row, c, c_row, skip, bias, states, source, slots, fresh,
    starts, bounds, pieces, out, channels, dim, size, each, low, high,
    BIAS: tl.constexpr, SEGMENT: tl.constexpr, BC: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Process BC channels of a row with several tokens, all tokens of a segment at once."""
    row = tl.program_id(0)
    if tl.load(starts + row + 1) - tl.load(starts + row) > 1:
        channel = tl.program_id(1) * BC + tl.arange(0, BC)
        index, ramp = tl.arange(0, BS), tl.arange(0, SEGMENT)
        inside = channel < channels
        head = channel // dim
        pair = inside[:, None] & (index < size)[None, :]
        where = channel[:, None].to(tl.int64) * size + index[None, :]
        new = tl.load(fresh + row)
        base = states + tl.load(source + row) * channels * size
        state = tl.load(base + where, pair & (new == 0), other=0.0)
        a = -tl.exp(tl.load(a_log + head[:, None] * size + index[None, :], pair, other=0.0))
        more = tl.load(skip + head, inside, other=0.0)
        added = tl.load(bias + head, inside, other=0.0) if BIAS else more
        shared = (head // each)[:, None] * size + index[None, :]
        begins = (ramp == 0)[:, None, None]
        ends = (ramp == SEGMENT - 1)[:, None, None]
        for piece in range(tl.load(bounds + row), tl.load(bounds + row + 1)):
            at = tl.load(pieces + piece * 3).to(tl.int64)
            token, known = at + ramp, ramp < tl.load(pieces + piece * 3 + 1)
            mine = known[:, None] & inside[None, :]
            some = known[:, None, None] & pair[None, :, :]
            now = tl.load(x + token[:, None] * x_row + channel[None, :], mine, other=0.0)
            now = now.to(tl.float32)
            step_size = tl.load(step + token[:, None] * step_row + head[None, :], mine, other=0.0)
            dt = tl.where(mine, _step_size(step_size, added[None, :], low, high, BIAS), 0.0)
            b_at = b + token[:, None, None] * b_row + shared[None, :, :]
            here = tl.load(b_at, some, other=0.0).to(tl.float32)
            decay = tl.exp(dt[:, :, None] * a[None, :, :])
            drive = (now * dt)[:, :, None] * here
            drive = tl.where(begins, drive + decay * state[None, :, :], drive)
            _, after = tl.associative_scan((decay, drive), 0, _after)
            c_at = c + token[:, None, None] * c_row + shared[None, :, :]
            there = tl.load(c_at, some, other=0.0).to(tl.float32)
            y = tl.sum(after * there, 2)
            to = out + token[:, None] * channels + channel[None, :]
            tl.store(to, y + more[None, :] * now, mine)
            # Tokens that do not exist leave the state as it is.
            state = tl.sum(tl.where(ends, after, 0.0), 0)
            slot = tl.load(pieces + piece * 3 + 2).to(tl.int64)
            if slot >= 0:
                tl.store(states + slot * channels * size + where, state, pair)
        tl.store(states + tl.load(slots + row) * channels * size + where, state, pair)


def selective_scan(
    x: Tensor,
    step: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    states: Tensor,
    plan: StatePlan,
    bias: Tensor | None = None,
    limit: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """The op `selective_scan`."""
    (tokens, heads, dim), (groups, size) = x.shape, b.shape[1:]
    paces = a_log.shape[1]
    need(tuple(step.shape) == (tokens, heads), f"step must be [{tokens}, {heads}]")
    need(tuple(a_log.shape) in {(heads, 1), (heads, size)}, f"a_log must have 1 or {size} columns")
    need(heads % groups == 0, f"{groups} groups do not divide {heads} heads")
    need(states.dtype == torch.float32 and states.is_contiguous(), "states must be float32, dense")
    x, step, b, c = (dense(part) for part in (x, step, b, c))
    split, out = (
        segments(plan, x.device),
        torch.empty(x.shape, dtype=torch.float32, device=x.device),
    )
    cuts = (plan.query_starts,) * 2 if split is None else (split.bounds, split.pieces)
    some = (
        x, x.stride(0), step, step.stride(0), a_log.contiguous(), b, b.stride(0), c, c.stride(0),
        skip, skip if bias is None else bias, states, sources(plan), plan.slots, fresh(plan),
        plan.query_starts, *cuts, out,
    )  # fmt: skip
    rest = (dim, size, heads // groups, float(limit[0]), min(float(limit[1]), 3e38))
    rows, fits = len(plan.counts), paces == 1
    wide = power_of_two(size)
    tiles = tuned("selective_scan", SIZE=wide)
    block = min(power_of_two(heads * dim), tiles["BC"])
    if min(plan.counts) == 1:
        launch(
            _by_token, (rows, cut(heads * dim, block)), *some, heads * dim, *rest,
            PACES=paces if paces == 1 else 2, BIAS=bias is not None, PIECES=split is not None,
            SINGLE=True, BC=block, BS=wide, num_warps=tiles["num_warps"],
        )  # fmt: skip
    if not fits and max(plan.counts) > 1:
        more = tuned("selective_scan_channels", SIZE=wide)
        part = min(power_of_two(heads * dim), more["BC"])
        launch(
            _by_scan, (rows, cut(heads * dim, part)), *some, heads * dim, *rest,
            BIAS=bias is not None, SEGMENT=SEGMENT, BC=part, BS=wide,
            num_warps=more["num_warps"],
        )  # fmt: skip
    if fits and max(plan.counts) > 1:
        more = tuned("selective_scan_segments", SIZE=wide)
        part = max(16, min(power_of_two(dim), more["BD"]))
        launch(
            _by_segment, (rows, heads, cut(dim, part)), *some, heads, *rest,
            BIAS=bias is not None, PRECISION=precision(), SEGMENT=SEGMENT, BD=part,
            BS=max(16, wide), num_warps=more["num_warps"], num_stages=more["num_stages"],
        )  # fmt: skip
    return out


OPS = {"selective_scan": selective_scan}
