"""Write keys and values to their cache slots: one program per group of heads of a token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.cache import LATENT_BYTES, CacheForm
from modulm_kernels_triton.kept_blocks import NVFP4, keep_blocks
from modulm_kernels_triton.kept_latents import write_latents
from modulm_kernels_triton.kept_numbers import keep
from modulm_kernels_triton.launch import cut, launch, power_of_two
from modulm_kernels_triton.tuning import tuned

__all__ = ["write_kv"]


@triton.jit
def _write_kv(
    k, v, cache, scales, slots, k_scale, v_scale, k_token, k_head, v_token, v_head,
    block_stride, head_stride, scales_at, heads, scale_step,
    BLOCK_SIZE: tl.constexpr, TOKEN: tl.constexpr, SIZE: tl.constexpr, VALUES: tl.constexpr,
    HEADS: tl.constexpr, PAD: tl.constexpr, PAD_V: tl.constexpr, KEPT: tl.constexpr,
    SCALED: tl.constexpr, VALUES_AT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    there = head < heads
    slot = tl.load(slots + token)
    start = slot // BLOCK_SIZE * block_stride + head.to(tl.int64) * head_stride
    inside = slot % BLOCK_SIZE
    at_scale = scales + (start + scales_at) // 4 + inside * 2
    start = start + inside * TOKEN
    of_key = tl.full([HEADS], 1.0, tl.float32)
    of_value = of_key
    if SCALED:
        of_key = tl.load(k_scale + head * scale_step, there, other=1.0)
        of_value = tl.load(v_scale + head * scale_step, there, other=1.0)
    d = tl.arange(0, PAD)
    mask = there[:, None] & (d < SIZE)[None, :]
    x = tl.load(k + token * k_token + head[:, None] * k_head + d[None, :], mask, other=0.0)
    if KEPT >= NVFP4:
        keep_blocks(x.to(tl.float32), cache + start, there, HEADS, SIZE, PAD, KEPT)
    else:
        where = cache + start[:, None] + d[None, :]
        keep(x.to(tl.float32), where, mask, of_key, at_scale, there, KEPT)
    if VALUES > 0:
        d = tl.arange(0, PAD_V)
        mask = there[:, None] & (d < VALUES)[None, :]
        x = tl.load(v + token * v_token + head[:, None] * v_head + d[None, :], mask, other=0.0)
        if KEPT >= NVFP4:
            base = cache + start + VALUES_AT
            keep_blocks(x.to(tl.float32), base, there, HEADS, VALUES, PAD_V, KEPT)
        else:
            where = cache + start[:, None] + (VALUES_AT + d)[None, :]
            keep(x.to(tl.float32), where, mask, of_value, at_scale + 1, there, KEPT)


def write_kv(
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    form: CacheForm,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write k [n, kv heads, size] and v [n, kv heads, values] to slots [n] int64; heads are dense.

    k_scale, v_scale: [1] or [kv heads] fp32, divisors of keys and values, both or none. The value
    of a latent cache is ignored.
    """
    if form.name in LATENT_BYTES:
        write_latents(k, cache, form, slots)
        return
    values = 0 if form.latent else form.value_dim
    pad, pad_values = power_of_two(form.head_dim), power_of_two(max(values, 1))
    constants = dict(tuned("write_kv", SIZE=pad))
    heads = min(power_of_two(form.kv_heads), constants.pop("HEADS"))
    writable, scales = form.writable(cache), form.scales(cache)
    launch(
        _write_kv, (len(slots), cut(form.kv_heads, heads)), k, k if form.latent else v, writable,
        k if scales is None else scales, slots, k if k_scale is None else k_scale,
        k if v_scale is None else v_scale, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        form.block, form.head, form.scales_at, form.kv_heads,
        int(k_scale is not None and len(k_scale) > 1), BLOCK_SIZE=form.block_size,
        TOKEN=form.token, SIZE=form.head_dim, VALUES=values, HEADS=heads, PAD=pad,
        PAD_V=pad_values, KEPT=form.code, SCALED=k_scale is not None, VALUES_AT=form.values_at,
        **constants,
    )  # fmt: skip
