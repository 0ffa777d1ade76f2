"""Rotary embeddings in place: one program per group of heads of a token.

Each number is read only by the threads that write it, so nothing is read after it was written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.tuning import tuned

__all__ = ["OPS", "rotary", "turn"]


@triton.jit
def turn(base, to, mask, cos, sin, i, HALF: tl.constexpr, NEOX: tl.constexpr):
    """Rotate the pairs i of the heads at base [heads, 1] and write them to `to` [heads, 1]."""
    if NEOX:
        first = i
        second = i + HALF
    else:
        first = 2 * i
        second = 2 * i + 1
    x = tl.load(base + first[None, :], mask, other=0.0).to(tl.float32)
    y = tl.load(base + second[None, :], mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = to.dtype.element_ty
    tl.store(to + first[None, :], (x * cos[None, :] - y * sin[None, :]).to(dtype), mask)
    tl.store(to + second[None, :], (y * cos[None, :] + x * sin[None, :]).to(dtype), mask)


@triton.jit
def _rotary(
    q, k, positions, cos_sin, q_token, q_head, k_token, k_head, heads, kv_heads,
    HALF: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, PAD)
    inside = i < HALF
    row = cos_sin + tl.load(positions + token) * (2 * HALF) + i
    cos = tl.load(row, inside, other=0.0).to(tl.float32)
    sin = tl.load(row + HALF, inside, other=0.0).to(tl.float32)
    base = q + token * q_token + (head * q_head)[:, None]
    turn(base, base, (head < heads)[:, None] & inside[None, :], cos, sin, i, HALF, NEOX)
    kv_index = head - heads
    base = k + token * k_token + (kv_index * k_head)[:, None]
    mask = ((kv_index >= 0) & (kv_index < kv_heads))[:, None] & inside[None, :]
    turn(base, base, mask, cos, sin, i, HALF, NEOX)


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, neox: bool = True) -> None:
    """The op `rotary`; q: [T, Hq, D], k: [T, Hk, D] with dense heads."""
    heads, kv_heads, half = q.shape[1], k.shape[1], cos_sin.shape[-1] // 2
    pad = power_of_two(half)
    constants = dict(tuned("rotary", SIZE=2 * pad))
    block = min(power_of_two(heads + kv_heads), constants.pop("HEADS"))
    launch(
        _rotary, (q.shape[0], cut(heads + kv_heads, block)), q, k, positions, cos_sin, q.stride(0),
        q.stride(1), k.stride(0), k.stride(1), heads, kv_heads, HALF=half, PAD=pad, HEADS=block,
        NEOX=neox, **constants,
    )  # fmt: skip


OPS = {"rotary": rotary}
