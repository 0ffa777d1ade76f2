"""Causal convolution along rows, per channel, with states of the last inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modulm.contracts.model import StatePlan
from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.segments import dense, fresh, segments, sources
from modulm_kernels_triton.weights import need

__all__ = ["OPS"]

_TOKENS, _CHANNELS = 32, 128


@triton.jit
def _seen(
    x, x_row, states, state, fresh, first, at, lag, channel, inside, channels, PAST: tl.constexpr
):
    """Input `at` - PAST + lag of a row, from before its first token where that is negative."""
    position = at - PAST + lag
    now = tl.load(
        x + (first + position).to(tl.int64) * x_row + channel, inside & (position >= 0), other=0.0
    )
    before = tl.load(
        states + state + (position + PAST).to(tl.int64) * channels + channel,
        inside & (position < 0) & (fresh == 0),
        other=0.0,
    )
    return tl.where(position >= 0, now.to(tl.float32), before.to(tl.float32))


@triton.jit
def _causal_conv(
    x, x_row, weight, bias, states, source, fresh, starts, out, channels,
    PAST: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    at = tl.program_id(1) * BT + tl.arange(0, BT)[:, None]
    channel = tl.program_id(2) * BC + tl.arange(0, BC)[None, :]
    known = channel < channels
    inside = (at < last - first) & known
    if tl.program_id(1) * BT < last - first:
        new = tl.load(fresh + row)
        state = tl.load(source + row) * PAST * channels
        total = tl.zeros((BT, BC), tl.float32)
        for lag in tl.static_range(PAST + 1):
            factor = tl.load(weight + channel * (PAST + 1) + lag, known, other=0.0).to(tl.float32)
            total += factor * _seen(
                x, x_row, states, state, new, first, at, lag, channel, inside, channels, PAST
            )
        if BIAS:
            total += tl.load(bias + channel, known, other=0.0).to(tl.float32)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        target = out + (first + at).to(tl.int64) * channels + channel
        tl.store(target, total.to(out.dtype.element_ty), inside)


@triton.jit
def _keep_inputs(
    x, x_row, states, source, slots, fresh, starts, bounds, pieces, channels,
    PAST: tl.constexpr, PIECES: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Write the last inputs of each row, and those before intermediate states, to their slots."""
    row = tl.program_id(0)
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = channel < channels
    new = tl.load(fresh + row)
    state = tl.load(source + row) * PAST * channels
    if PIECES:
        for piece in range(tl.load(bounds + row), tl.load(bounds + row + 1)):
            slot = tl.load(pieces + piece * 3 + 2).to(tl.int64)
            end = tl.load(pieces + piece * 3) + tl.load(pieces + piece * 3 + 1) - first
            if slot >= 0:
                for lag in tl.static_range(PAST):
                    value = _seen(
                        x, x_row, states, state, new, first, end, lag, channel, inside, channels,
                        PAST,
                    )  # fmt: skip
                    to = states + (slot * PAST + lag) * channels + channel
                    tl.store(to, value.to(states.dtype.element_ty), inside)
    # Oldest first: if a row's state is shifted in place, inputs are read before they are
    # overwritten.
    slot = tl.load(slots + row)
    for lag in tl.static_range(PAST):
        value = _seen(
            x, x_row, states, state, new, first, last - first, lag, channel, inside, channels, PAST
        )
        to = states + (slot * PAST + lag) * channels + channel
        tl.store(to, value.to(states.dtype.element_ty), inside)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, states: Tensor, plan: StatePlan
) -> Tensor:
    """The op `causal_conv`: compute the outputs of all rows, then store their last inputs."""
    tokens, channels = x.shape
    past = weight.shape[-1] - 1
    need(tuple(weight.shape) == (channels, 1, past + 1), f"weight must be [{channels}, 1, width]")
    need(tuple(states.shape[1:]) == (past, channels), f"states must be [slots, {past}, {channels}]")
    need(states.is_contiguous() and weight.is_contiguous(), "states and weight must be dense")
    x, split, rows = dense(x), segments(plan, x.device), len(plan.counts)
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    block, source = min(_CHANNELS, power_of_two(channels)), sources(plan)
    longest = max(plan.counts)
    size = min(_TOKENS, power_of_two(longest))
    launch(
        _causal_conv, (rows, cut(longest, size), cut(channels, block)),
        x, x.stride(0), weight, x if bias is None else bias, states, source, fresh(plan),
        plan.query_starts, out, channels,
        PAST=past, BIAS=bias is not None, SILU=silu, BT=size, BC=block,
    )  # fmt: skip
    launch(
        _keep_inputs, (rows, cut(channels, block)),
        x, x.stride(0), states, source, plan.slots, fresh(plan), plan.query_starts,
        plan.query_starts if split is None else split.bounds,
        plan.query_starts if split is None else split.pieces, channels,
        PAST=past, PIECES=split is not None, BC=block,
    )  # fmt: skip
    return out


OPS = {"causal_conv": causal_conv}
