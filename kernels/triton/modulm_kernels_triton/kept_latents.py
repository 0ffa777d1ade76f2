"""Latents in FlashMLA's formats, for a latent of 512 and a rotated part of 64 (cache.py).

- fp8_ds_mla: 512 e4m3, four fp32 scales of 128 numbers each, 64 bf16: 656 bytes.
- nvfp4_ds_mla: 256 pairs of e2m1, 64 e4m3, 32 e4m3 scales of 16 numbers each, of which that of
  group g is at 8 (g % 4) + g // 4: 352 bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from modulm_kernels_triton.cache import CacheForm
from modulm_kernels_triton.kept_numbers import bytes_of_float8
from modulm_kernels_triton.launch import launch
from modulm_kernels_triton.narrow_floats import blocks_of_e2m1, e2m1_of_pairs, e4m3_of_bytes

__all__ = ["FP8_LATENT", "latent_of_token", "rotated_of_token", "write_latents"]

#: Code of fp8_ds_mla (cache.py); that of nvfp4_ds_mla follows.
FP8_LATENT = tl.constexpr(7)


@triton.jit
def latent_of_token(
    base, rows, inside, dtype: tl.constexpr, TILE: tl.constexpr, CODE: tl.constexpr
):  # fmt: skip
    """Return the latents [TILE, 512] of the tokens at bytes `rows`, 0 outside."""
    if CODE == FP8_LATENT:
        at, group = tl.arange(0, 512), tl.arange(0, 4)
        codes = tl.load(base + rows[:, None] + at[None, :], inside[:, None], other=0)
        floats = base.to(tl.pointer_type(tl.float32), bitcast=True)
        where = floats + (rows[:, None] + 512) // 4 + group[None, :]
        scale = tl.load(where, inside[:, None], other=0.0)
        wide = tl.broadcast_to(scale[:, :, None], (TILE, 4, 128))
        numbers = e4m3_of_bytes(codes) * tl.reshape(wide, (TILE, 512))
    else:
        pair, group = tl.arange(0, 256), tl.arange(0, 32)
        codes = tl.load(base + rows[:, None] + pair[None, :], inside[:, None], other=0)
        place = 320 + 8 * (group % 4) + group // 4
        stored = tl.load(base + rows[:, None] + place[None, :], inside[:, None], other=0)
        wide = tl.broadcast_to(e4m3_of_bytes(stored)[:, :, None], (TILE, 32, 16))
        numbers = e2m1_of_pairs(codes) * tl.reshape(wide, (TILE, 512))
    return numbers.to(dtype)


@triton.jit
def rotated_of_token(base, rows, inside, dtype: tl.constexpr, CODE: tl.constexpr):
    """Return the rotated parts [TILE, 64] of the tokens at bytes `rows`, 0 outside."""
    at = tl.arange(0, 64)
    if CODE == FP8_LATENT:
        halves = base.to(tl.pointer_type(tl.uint16), bitcast=True)
        where = halves + (rows[:, None] + 528) // 2 + at[None, :]
        bits = tl.load(where, inside[:, None], other=0).to(tl.int32) << 16
        numbers = bits.to(tl.float32, bitcast=True)
    else:
        codes = tl.load(base + rows[:, None] + (256 + at)[None, :], inside[:, None], other=0)
        numbers = e4m3_of_bytes(codes)
    return numbers.to(dtype)


@triton.jit
def _write(k, k_token, cache, slots, block_stride, BLOCK_SIZE: tl.constexpr, TOKEN: tl.constexpr,
           CODE: tl.constexpr):  # fmt: skip
    """Write one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    to = cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * TOKEN
    at, part = tl.arange(0, 512), tl.arange(0, 64)
    latent = tl.load(k + token * k_token + at).to(tl.float32)
    rotated = tl.load(k + token * k_token + 512 + part).to(tl.float32)
    if CODE == FP8_LATENT:
        grouped = tl.reshape(latent, (4, 128))
        scale = tl.maximum(tl.max(tl.abs(grouped), 1) / 448.0, 1e-12)
        codes = bytes_of_float8(grouped / scale[:, None], 3, 7, 448.0)
        tl.store(to + at, tl.reshape(codes, (512,)))
        floats = to.to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(floats + 128 + tl.arange(0, 4), scale)
        bits = rotated.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        halves = to.to(tl.pointer_type(tl.uint16), bitcast=True)
        tl.store(halves + 264 + part, rounded.to(tl.uint16))
    else:
        pairs, scales = blocks_of_e2m1(tl.reshape(latent, (1, 512)), 1, 512, False)
        tl.store(to + tl.arange(0, 256), tl.reshape(pairs, (256,)))
        tl.store(to + 256 + part, bytes_of_float8(rotated, 3, 7, 448.0))
        group = tl.arange(0, 32)
        tl.store(to + 320 + 8 * (group % 4) + group // 4, tl.reshape(scales, (32,)))


def write_latents(k: Tensor, cache: Tensor, form: CacheForm, slots: Tensor) -> None:
    """Write k [n, 1, 576] to slots [n] int64; tokens are dense."""
    launch(
        _write, (len(slots),), k, k.stride(0), cache, slots, form.block,
        BLOCK_SIZE=form.block_size, TOKEN=form.token, CODE=form.code,
    )  # fmt: skip
