"""The gated delta rule: token by token, or in segments with precomputed inverses.

Yang et al., arXiv 2412.06464, section 3.3. The inverse of each segment's unit triangular matrix
does not depend on the state, so it is computed for all segments in parallel.
"""

from __future__ import annotations

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
def _unit(x, AXIS: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, AXIS, keep_dims=True) + 1e-6)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _one(state, q, k, v, beta, decay, scale):
    """Process one token: state [BK, BV]; q, k: [BK]; v: [BV] -> (state, [BV])."""
    q, k = _unit(q, 0) * scale, _unit(k, 0)
    state = state * tl.exp(decay)
    change = (v - tl.sum(k[:, None] * state, 0)) * beta
    state += k[:, None] * change[None, :]
    return state, tl.sum(q[:, None] * state, 0)


@triton.jit
def _by_token(
    q, q_row, k, k_row, v, v_row, beta, beta_row, step, step_row, a_log, bias, states, source,
    slots, fresh, starts, bounds, pieces, out, heads, key_dim, value_dim, each, reach, scale,
    PIECES: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Process rows with one token."""
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(starts + row)
    if tl.load(starts + row + 1) - first == 1:
        at = first.to(tl.int64)
        key, value = tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
        known, inside = key < key_dim, value < value_dim
        pair = known[:, None] & inside[None, :]
        where = (head * key_dim + key)[:, None].to(tl.int64) * value_dim + value[None, :]
        wide = (head * 0 + heads).to(tl.int64) * key_dim * value_dim
        new = tl.load(fresh + row)
        state = tl.load(states + tl.load(source + row) * wide + where, pair & (new == 0), other=0.0)
        shared = head // each * key_dim + key
        query = tl.load(q + at * q_row + shared, known, other=0.0).to(tl.float32)
        keys = tl.load(k + at * k_row + shared, known, other=0.0).to(tl.float32)
        values = tl.load(v + at * v_row + head * value_dim + value, inside, other=0.0)
        moved = reach * _sigmoid(tl.load(beta + at * beta_row + head).to(tl.float32))
        fade = softplus(tl.load(step + at * step_row + head).to(tl.float32) + tl.load(bias + head))
        decay = -tl.exp(tl.load(a_log + head)) * fade
        state, y = _one(state, query, keys, values.to(tl.float32), moved, decay, scale)
        tl.store(out + (at * heads + head) * value_dim + value, y, inside)
        if PIECES:
            for piece in range(tl.load(bounds + row), tl.load(bounds + row + 1)):
                slot = tl.load(pieces + piece * 3 + 2).to(tl.int64)
                if slot >= 0:
                    tl.store(states + slot * wide + where, state, pair)
        tl.store(states + tl.load(slots + row) * wide + where, state, pair)


@triton.jit
def _segment(
    beta, beta_row, step, step_row, a_log, bias, pieces, piece, head, reach, SEGMENT: tl.constexpr
):  # fmt: skip
    """Return (tokens, which are valid, beta, cumulative decays), each [SEGMENT]."""
    ramp = tl.arange(0, SEGMENT)
    known = ramp < tl.load(pieces + piece * 3 + 1)
    token = tl.load(pieces + piece * 3).to(tl.int64) + ramp
    moved = tl.load(beta + token * beta_row + head, known, other=0.0).to(tl.float32)
    moved = tl.where(known, reach * _sigmoid(moved), 0.0)
    step_size = tl.load(step + token * step_row + head, known, other=0.0).to(tl.float32)
    fade = tl.where(known, softplus(step_size + tl.load(bias + head)), 0.0)
    return token, known, moved, tl.cumsum(-tl.exp(tl.load(a_log + head)) * fade, 0)


@triton.jit
def _vectors(x, x_row, token, known, shared, inside):
    """Return [SEGMENT, BK] fp32; shared: [BK], offsets of a token's vector."""
    where = token[:, None] * x_row + shared[None, :]
    return tl.load(x + where, known[:, None] & inside[None, :], other=0.0).to(tl.float32)


@triton.jit
def _invert(
    k, k_row, beta, beta_row, step, step_row, a_log, bias, pieces, inverse, heads, key_dim, each,
    reach, PRECISION: tl.constexpr, SEGMENT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Invert (1 + the changes that a segment's tokens make to each other), row by row.

    Keys are read in parts, so that the products fit into the memory of small GPUs.
    """
    piece, head = tl.program_id(0), tl.program_id(1)
    ramp = tl.arange(0, SEGMENT)
    count = tl.load(pieces + piece * 3 + 1)
    if count > 1:
        token, known, moved, total = _segment(
            beta, beta_row, step, step_row, a_log, bias, pieces, piece, head, reach, SEGMENT
        )
        mixing = tl.zeros((SEGMENT, SEGMENT), tl.float32)
        squares = tl.zeros((SEGMENT,), tl.float32)
        for first in range(0, key_dim, PART):
            key = first + tl.arange(0, PART)
            keys = _vectors(k, k_row, token, known, head // each * key_dim + key, key < key_dim)
            squares += tl.sum(keys * keys, 1)
            mixing = tl.dot(keys, tl.trans(keys), mixing, input_precision=PRECISION)
        length = tl.rsqrt(squares + 1e-6)
        mixing *= length[:, None] * length[None, :] * decays(total, SEGMENT) * moved[:, None]
        mixing = tl.where(ramp[:, None] > ramp[None, :], mixing, 0.0)
        inverted = (ramp[:, None] == ramp[None, :]).to(tl.float32)
        for i in range(1, count):
            line = tl.sum(tl.where(ramp[:, None] == i, mixing, 0.0), 0)
            before = tl.sum(line[:, None] * inverted, 0)
            inverted = tl.where(ramp[:, None] == i, inverted - before[None, :], inverted)
        target = (piece * heads + head).to(tl.int64) * SEGMENT * SEGMENT
        tl.store(inverse + target + ramp[:, None] * SEGMENT + ramp[None, :], inverted)


@triton.jit
def _by_segment(
    q, q_row, k, k_row, v, v_row, beta, beta_row, step, step_row, a_log, bias, states, source,
    slots, fresh, starts, bounds, pieces, out, heads, key_dim, value_dim, each, reach, scale,
    inverse, PRECISION: tl.constexpr, SEGMENT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Process BV columns of a head's state for a row of several tokens."""
    row, head = tl.program_id(0), tl.program_id(1)
    if tl.load(starts + row + 1) - tl.load(starts + row) > 1:
        key, value = tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
        ramp = tl.arange(0, SEGMENT)
        pair = (key < key_dim)[:, None] & (value < value_dim)[None, :]
        where = (head * key_dim + key)[:, None].to(tl.int64) * value_dim + value[None, :]
        wide = (head * 0 + heads).to(tl.int64) * key_dim * value_dim
        new = tl.load(fresh + row)
        state = tl.load(states + tl.load(source + row) * wide + where, pair & (new == 0), other=0.0)
        shared = head // each * key_dim + key
        for piece in range(tl.load(bounds + row), tl.load(bounds + row + 1)):
            count = tl.load(pieces + piece * 3 + 1)
            if count == 1:
                at = tl.load(pieces + piece * 3).to(tl.int64)
                inside = value < value_dim
                one_query = tl.load(q + at * q_row + shared, key < key_dim, other=0.0)
                one_key = tl.load(k + at * k_row + shared, key < key_dim, other=0.0)
                one_value = tl.load(v + at * v_row + head * value_dim + value, inside, other=0.0)
                one_beta = reach * _sigmoid(tl.load(beta + at * beta_row + head).to(tl.float32))
                step_size = tl.load(step + at * step_row + head).to(tl.float32)
                decay = -tl.exp(tl.load(a_log + head)) * softplus(step_size + tl.load(bias + head))
                state, one = _one(
                    state, one_query.to(tl.float32), one_key.to(tl.float32),
                    one_value.to(tl.float32), one_beta, decay, scale,
                )  # fmt: skip
                tl.store(out + (at * heads + head) * value_dim + value, one, inside)
            elif count > 1:
                token, known, moved, total = _segment(
                    beta, beta_row, step, step_row, a_log, bias, pieces, piece, head, reach, SEGMENT
                )
                dims = known[:, None] & (value < value_dim)[None, :]
                keys = _unit(_vectors(k, k_row, token, known, shared, key < key_dim), 1)
                query = _unit(_vectors(q, q_row, token, known, shared, key < key_dim), 1) * scale
                values = tl.load(
                    v + token[:, None] * v_row + head * value_dim + value[None, :], dims, other=0.0
                ).to(tl.float32)
                grown = tl.exp(total)[:, None]
                prediction = tl.dot(keys, state, input_precision=PRECISION)
                source_at = (piece * heads + head).to(tl.int64) * SEGMENT * SEGMENT
                inverted = tl.load(inverse + source_at + ramp[:, None] * SEGMENT + ramp[None, :])
                change = tl.dot(
                    inverted,
                    moved[:, None] * (values - grown * prediction),
                    input_precision=PRECISION,
                )
                y = grown * tl.dot(query, state, input_precision=PRECISION)
                mixed = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
                mixed *= decays(total, SEGMENT)
                y = tl.dot(mixed, change, y, input_precision=PRECISION)
                whole = tl.sum(tl.where(ramp == SEGMENT - 1, total, 0.0), 0)
                left = tl.exp(whole - total)
                state = state * tl.exp(whole)
                state = tl.dot(
                    tl.trans(keys * left[:, None]), change, state, input_precision=PRECISION
                )
                to = out + (token[:, None] * heads + head) * value_dim + value[None, :]
                tl.store(to, y, dims)
            slot = tl.load(pieces + piece * 3 + 2).to(tl.int64)
            if slot >= 0:
                tl.store(states + slot * wide + where, state, pair)
        tl.store(states + tl.load(slots + row) * wide + where, state, pair)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    step: Tensor,
    a_log: Tensor,
    bias: Tensor,
    states: Tensor,
    plan: StatePlan,
    reach: float = 1.0,
) -> Tensor:
    """The op `delta_rule`."""
    (_, key_heads, key_dim), (heads, value_dim) = k.shape, v.shape[1:]
    need(heads % key_heads == 0, f"{key_heads} key heads do not divide {heads} heads")
    fits = tuple(states.shape[1:]) == (heads, key_dim, value_dim) and states.is_contiguous()
    need(fits, f"states must be [slots, {heads}, {key_dim}, {value_dim}], dense")
    q, k, v, beta, step = (dense(part) for part in (q, k, v, beta, step))
    split, device = segments(plan, v.device), v.device
    out = torch.empty(v.shape, dtype=torch.float32, device=device)
    cuts = (plan.query_starts,) * 2 if split is None else (split.bounds, split.pieces)
    rates = (beta, beta.stride(0), step, step.stride(0), a_log, bias)
    arguments = (
        q, q.stride(0), k, k.stride(0), v, v.stride(0), *rates, states, sources(plan), plan.slots,
        fresh(plan), plan.query_starts, *cuts, out, heads, key_dim, value_dim, heads // key_heads,
        float(reach), key_dim**-0.5,
    )  # fmt: skip
    rows, keys = len(plan.counts), max(16, power_of_two(key_dim))
    tiles = tuned("delta_rule", SIZE=keys)
    values = max(16, min(power_of_two(value_dim), tiles["BV"]))
    grid = (rows, heads, cut(value_dim, values))
    if min(plan.counts) == 1:
        launch(
            _by_token, grid, *arguments, PIECES=split is not None, BK=keys, BV=values,
            num_warps=tiles["num_warps"],
        )  # fmt: skip
    if split is not None and max(plan.counts) > 1:
        count = split.pieces.shape[0]
        inverse = torch.empty(count, heads, SEGMENT, SEGMENT, dtype=torch.float32, device=device)
        meta = {"PRECISION": precision(), "SEGMENT": SEGMENT}
        launch(
            _invert, (count, heads), k, k.stride(0), *rates, split.pieces, inverse, heads, key_dim,
            heads // key_heads, float(reach), **meta, PART=min(keys, 64),
            num_warps=tiles["num_warps"],
        )  # fmt: skip
        launch(
            _by_segment, grid, *arguments, inverse, **meta, BK=keys, BV=values,
            num_warps=tiles["num_warps"], num_stages=tiles["num_stages"],
        )  # fmt: skip
    return out


OPS = {"delta_rule": delta_rule}
