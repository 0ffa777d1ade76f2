"""One kernel between a layer's projection and its attention: split, norm per head, rotary
embeddings, cache writes. One program per group of heads of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.cache import CacheForm
from modulm_kernels_triton.kept_blocks import NVFP4, keep_blocks
from modulm_kernels_triton.kept_numbers import keep
from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.tuning import tuned

__all__ = ["qkv_prepare"]


@triton.jit
def _part(base, d, mask, norm, weights, dtype: tl.constexpr, NORM: tl.constexpr):
    """Return numbers d of heads as fp32, normalised: times norm [heads] and weights [.., d]."""
    x = tl.load(base + d[None, :], mask, other=0.0).to(tl.float32)
    if NORM:
        x = (x * norm[:, None] * weights).to(dtype).to(tl.float32)
    return x


@triton.jit
def _weights(q_norm, k_norm, head, d, inside, offset, heads):
    """Return [heads, d]: the norm weights of queries and keys."""
    of_q = tl.load(q_norm + d, inside, other=0.0).to(tl.float32) + offset
    of_k = tl.load(k_norm + d, inside, other=0.0).to(tl.float32) + offset
    return tl.where((head < heads)[:, None], of_q[None, :], of_k[None, :])


@triton.jit
def _qkv_prepare(
    qkv, q_out, cache, scales, slots, q_norm, k_norm, cos_sin, positions, k_scale, v_scale,
    qkv_token, block_stride, head_stride, scales_at, heads, kv_heads, scale_step, eps, offset,
    BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr,
    TURNED: tl.constexpr, NEOX: tl.constexpr, NORM: tl.constexpr, KEPT: tl.constexpr,
    SCALED: tl.constexpr, TOKEN: tl.constexpr, VALUES_AT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = head < heads + 2 * kv_heads
    turning = there & (head < heads + kv_heads)
    d = tl.arange(0, PAD)
    inside = d < SIZE
    mask = there[:, None] & inside[None, :]
    dtype: tl.constexpr = qkv.dtype.element_ty
    base = qkv + token * qkv_token + head[:, None] * SIZE
    x = tl.load(base + d[None, :], mask, other=0.0).to(tl.float32)
    norm = tl.full([HEADS], 1.0, tl.float32)
    if NORM:
        norm = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)
        weights = _weights(q_norm, k_norm, head, d, inside, offset, heads)
        normed = (x * norm[:, None] * weights).to(dtype).to(tl.float32)
        x = tl.where(turning[:, None], normed, x)
    if TURNED > 0:
        HALF: tl.constexpr = TURNED // 2
        if NEOX:
            first = d < HALF
            other = tl.where(first, d + HALF, d - HALF)
            angle = tl.where(first, d, d - HALF)
        else:
            first = d % 2 == 0
            other = tl.where(first, d + 1, d - 1)
            angle = d // 2
        turned = d < TURNED
        weights = x
        if NORM:
            weights = _weights(q_norm, k_norm, head, other, turned, offset, heads)
        both = turning[:, None] & turned[None, :]
        partner = _part(base, other, both, norm, weights, dtype, NORM)
        row = cos_sin + tl.load(positions + token) * TURNED + angle
        cos = tl.load(row, turned, other=1.0).to(tl.float32)
        sin = tl.load(row + HALF, turned, other=0.0).to(tl.float32)
        sin = tl.where(first, -sin, sin)
        x = tl.where(both, x * cos[None, :] + partner * sin[None, :], x)
    to_q = q_out + (token * heads + head[:, None]) * SIZE + d[None, :]
    tl.store(to_q, x.to(q_out.dtype.element_ty), mask & (head < heads)[:, None])
    is_value = head >= heads + kv_heads
    cached = there & (head >= heads)
    kv_head = tl.where(is_value, head - heads - kv_heads, head - heads)
    slot = tl.load(slots + token)
    start = slot // BLOCK_SIZE * block_stride + kv_head.to(tl.int64) * head_stride
    in_block = slot % BLOCK_SIZE
    at_scale = scales + (start + scales_at) // 4 + in_block * 2 + is_value.to(tl.int32)
    start = start + in_block * TOKEN + tl.where(is_value, VALUES_AT, 0)
    factor = norm * 0.0 + 1.0
    if SCALED:
        of_key = tl.load(k_scale + kv_head * scale_step, cached & (is_value == 0), other=1.0)
        of_value = tl.load(v_scale + kv_head * scale_step, cached & is_value, other=1.0)
        factor = of_key * of_value
    rounded = x.to(dtype).to(tl.float32)
    if KEPT >= NVFP4:
        keep_blocks(rounded, cache + start, cached, HEADS, SIZE, PAD, KEPT)
    else:
        keep(rounded, cache + start[:, None] + d[None, :], mask & cached[:, None], factor, at_scale,
             cached, KEPT)  # fmt: skip


def qkv_prepare(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    form: CacheForm,
    heads: int,
    neox: bool = True,
    norm_offset: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Split qkv [T, (Hq + 2 Hk) D]: return queries [T, Hq, D], write the rest to `slots` [T] int64.

    q_norm, k_norm: [D], both or none; cos_sin: [positions, R] or None. See
    `modulm.testing.paged_attention.qkv_prepare`.
    """
    size, kv_heads = form.head_dim, form.kv_heads
    q_out = torch.empty(qkv.shape[0], heads, size, dtype=qkv.dtype, device=qkv.device)
    scales, scaled = form.scales(cache), k_scale is not None
    pad = power_of_two(size)
    constants = dict(tuned("qkv_prepare", SIZE=pad))
    block = min(power_of_two(heads + 2 * kv_heads), constants.pop("HEADS"))
    optional = [x if x is not None else qkv for x in (q_norm, k_norm, cos_sin)]
    launch(
        _qkv_prepare, (qkv.shape[0], cut(heads + 2 * kv_heads, block)), qkv, q_out,
        form.writable(cache), qkv if scales is None else scales, slots, *optional, positions,
        qkv if k_scale is None else k_scale, qkv if v_scale is None else v_scale, qkv.stride(0),
        form.block, form.head, form.scales_at, heads, kv_heads,
        int(k_scale is not None and len(k_scale) > 1), eps, norm_offset,
        BLOCK_SIZE=form.block_size, SIZE=size, PAD=pad, HEADS=block,
        TURNED=0 if cos_sin is None else cos_sin.shape[1], NEOX=neox, NORM=q_norm is not None,
        KEPT=form.code, SCALED=scaled, TOKEN=form.token, VALUES_AT=form.values_at, **constants,
    )  # fmt: skip
    return q_out
