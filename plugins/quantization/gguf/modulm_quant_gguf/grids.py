"""Decoders of the IQ types, whose values come from a table of vectors and from sign bits.

The tables are those of the package `gguf`, imported when such a type is first read.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from modulm.errors import UnsupportedError
from modulm.plugins.index import to_install
from modulm_quant_gguf.blocks import Decoded, bits_of, half, planes

__all__ = ["iq1_m", "iq1_s", "iq2_s", "iq2_xs", "iq2_xxs", "iq3_s", "iq3_xxs"]


@cache
def _grid(name: str) -> Tensor:
    """Return a type's table: [entries, 4 or 8] int8. Raises UnsupportedError without `gguf`."""
    try:
        from gguf import quants
    except ImportError as error:
        raise UnsupportedError(
            f"tensors of type {name} need the package gguf{to_install('gguf')}"
        ) from error
    kind = getattr(quants, name)
    kind.init_grid()
    grid: Tensor = torch.from_numpy(kind.grid).reshape(kind.grid_shape).to(torch.int8)
    return grid


def _vectors(name: str, ids: Tensor) -> Tensor:
    """Look up vectors: [n, ids] -> [n, columns] int8."""
    return _grid(name).to(ids.device)[ids.long()].flatten(1)


def _words(b: Tensor) -> Tensor:
    """Read bytes as 32-bit numbers: [n, bytes / 4] int64."""
    return b.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def _shorts(b: Tensor) -> Tensor:
    """Read bytes as 16-bit numbers: [n, bytes / 2] int32."""
    return b.contiguous().view(torch.int16).int() & 0xFFFF


def _signed(values: Tensor, bits: Tensor) -> Tensor:
    """Negate values whose bit is set."""
    return torch.where(bits.bool(), -values, values)


def _even(seven: Tensor) -> Tensor:
    """Expand 7 sign bits to 8 by an even number of signs: [n, count] -> [n, 8 count]."""
    shifts = torch.arange(7, device=seven.device)
    bits = seven[..., None] >> shifts & 1
    return torch.cat([bits, bits.sum(-1, keepdim=True) & 1], -1).flatten(1)


def _four_sevens(packed: Tensor) -> Tensor:
    """Split bits 0 to 27 into four 7-bit numbers: [n, words] -> [n, 4 words]."""
    shifts = torch.tensor((0, 7, 14, 21), device=packed.device)
    return (packed[..., None] >> shifts & 127).flatten(1)


def iq2_xxs(b: Tensor) -> Decoded:
    packed = _words(b[:, 2:]).unflatten(1, (-1, 2))
    ids = b[:, 2:].reshape(len(b), -1, 8)[..., :4].flatten(1)
    values = _signed(_vectors("IQ2_XXS", ids), _even(_four_sevens(packed[..., 1])))
    scales = half(b, 0) * (0.5 + (packed[..., 1] >> 28).float()) * 0.25
    return Decoded(values, scales)


def iq2_xs(b: Tensor) -> Decoded:
    entries = _shorts(b[:, 2:66])
    values = _signed(_vectors("IQ2_XS", entries & 511), _even(entries >> 9))
    scales = half(b, 0) * (0.5 + planes(b[:, 66:], 1, 4).float()) * 0.25
    return Decoded(values, scales)


def iq2_s(b: Tensor) -> Decoded:
    ids = b[:, 2:34].int() | planes(b[:, 66:74], 1, 2).int() << 8
    values = _signed(_vectors("IQ2_S", ids), bits_of(b[:, 34:66]))
    scales = half(b, 0) * (0.5 + planes(b[:, 74:], 1, 4).float()) * 0.25
    return Decoded(values, scales)


def iq3_xxs(b: Tensor) -> Decoded:
    packed = _words(b[:, 66:])
    values = _signed(_vectors("IQ3_XXS", b[:, 2:66]), _even(_four_sevens(packed)))
    scales = half(b, 0) * (0.5 + (packed >> 28).float()) * 0.5
    return Decoded(values, scales)


def iq3_s(b: Tensor) -> Decoded:
    """Values are odd numbers from -15 to 15."""
    ids = b[:, 2:66].int() | bits_of(b[:, 66:74]).int() << 8
    values = _signed(_vectors("IQ3_S", ids), bits_of(b[:, 74:106]))
    scales = half(b, 0) * (1 + 2 * planes(b[:, 106:], 1, 4).float())
    return Decoded(((values + 15) // 2).to(torch.uint8), scales * 2, 7.5)


def iq1_s(b: Tensor) -> Decoded:
    """Values are -1, 0 and 1, shifted by an eighth per group."""
    high = _shorts(b[:, 34:])
    shifts = torch.tensor((0, 3, 6, 9), device=b.device)
    ids = b[:, 2:34].int() | (high[..., None] >> shifts & 7).flatten(1) << 8
    scales = half(b, 0) * (2 * (high >> 12 & 7) + 1).float()
    offsets = torch.where(high >> 15 > 0, 1.125, 0.875)
    return Decoded((_vectors("IQ1_S", ids) + 1).to(torch.uint8), scales, offsets)


def iq1_m(b: Tensor) -> Decoded:
    """As IQ1_S with a shift per eight columns, which makes values multiples of 1/8."""
    packed, high = _shorts(b[:, 48:]), planes(b[:, 32:48], 1, 4)
    bit_shifts = torch.tensor((12, 8, 4, 0), device=b.device)
    whole = ((packed & 0xF000) >> bit_shifts).sum(1, keepdim=True)
    scale = torch.where(whole > 0x7FFF, whole - 0x10000, whole).to(torch.int16)
    shifts = torch.tensor((0, 3, 6, 9), device=b.device)
    factors = 2 * (packed[..., None] >> shifts & 7).flatten(1) + 1
    ids = b[:, :32].int() | (high & 7).int() << 8
    less = torch.where(high >> 3 > 0, -1, 1).to(torch.int8).repeat_interleave(8, 1)
    values = _vectors("IQ1_M", ids) * 8 + less
    return Decoded(values, scale.view(torch.float16).float() * factors.float() * 0.125)
