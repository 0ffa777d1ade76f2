"""Queries and keys of latent attention: the product per head in torch, the rest in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.rotary import turn
from modulm_kernels_triton.tuning import tuned

__all__ = ["OPS", "latent_prepare"]


@triton.jit
def _latent_prepare(
    q, kept, weight, cos_sin, positions, queries, keys, q_token, q_head, kept_row, heads, eps,
    RANK: tl.constexpr, PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    """Rotate the queries of some heads; a token's first program also builds its key."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    width: tl.constexpr = RANK + 2 * HALF
    i = tl.arange(0, HALF_PAD)
    inside = i < HALF
    row = cos_sin + tl.load(positions + token) * (2 * HALF) + i
    cos = tl.load(row, inside, other=0.0).to(tl.float32)
    sin = tl.load(row + HALF, inside, other=0.0).to(tl.float32)
    mask = (head < heads)[:, None] & inside[None, :]
    to = queries + ((token * heads + head) * width + RANK)[:, None]
    turn(q + token * q_token + (head * q_head)[:, None], to, mask, cos, sin, i, HALF, NEOX)
    if tl.program_id(1) == 0:
        first = head == 0
        base = kept + token * kept_row + (RANK + head * 0)[:, None]
        to = keys + token * width + (RANK + head * 0)[:, None]
        turn(base, to, first[:, None] & inside[None, :], cos, sin, i, HALF, NEOX)
        at = tl.arange(0, PAD)
        x = tl.load(kept + token * kept_row + at, at < RANK, other=0.0).to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)
        x = x * tl.load(weight + at, at < RANK, other=0.0).to(tl.float32)
        tl.store(keys + token * width + at, x.to(keys.dtype.element_ty), at < RANK)


def latent_prepare(
    q: Tensor,
    latents: Tensor,
    up: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    neox: bool = True,
) -> tuple[Tensor, Tensor]:
    """The op `latent_prepare`."""
    tokens, heads, _ = q.shape
    nope, rank = up.shape[1:]
    turned = cos_sin.shape[-1]
    queries = q.new_empty(tokens, heads, rank + turned)
    keys = q.new_empty(tokens, 1, rank + turned)
    queries[..., :rank] = torch.bmm(q[..., :nope].transpose(0, 1), up).transpose(0, 1)
    half = power_of_two(turned // 2)
    constants = dict(tuned("rotary", SIZE=2 * half))
    block = min(power_of_two(heads), constants.pop("HEADS"))
    launch(
        _latent_prepare, (tokens, cut(heads, block)), q[..., nope:], latents, weight, cos_sin,
        positions, queries, keys, q.stride(0), q.stride(1), latents.stride(0), heads, eps,
        RANK=rank, PAD=power_of_two(rank), HALF=turned // 2, HALF_PAD=half, HEADS=block, NEOX=neox,
        **constants,
    )  # fmt: skip
    return queries, keys


OPS = {"latent_prepare": latent_prepare}
