"""Store keys and values in fewer bits than they are computed in."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["INTEGERS", "narrow", "pack", "packed_width", "unpack", "widen"]

#: Formats with one scale per token and head, and their largest value.
INTEGERS = {"int8": 127, "int4": 7}
_SCALE = 4  # bytes
_TINY = 1e-12


def narrow(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Divide x [tokens, kv heads, size] by its scale and round. Values outside the range of an
    8-bit float are clamped to its largest number.
    """
    if scale is not None:
        x = x / scale[:, None]
    if dtype.itemsize == 1:
        top = torch.finfo(dtype).max
        x = x.clamp(-top, top)
    return x.to(dtype)


def widen(x: Tensor, scale: Tensor | None) -> Tensor:
    """Multiply x [R, kv heads, L, size] by its scale."""
    return x if scale is None else (x * scale[:, None, None]).to(x.dtype)


def packed_width(kind: str, size: int) -> int:
    """Return the bytes of `size` numbers and their scale."""
    return (size // 2 if kind == "int4" else size) + _SCALE


def pack(x: Tensor, kind: str) -> Tensor:
    """Encode x [tokens, kv heads, size] as [tokens, kv heads, width] uint8: codes and scale."""
    wide, top = x.float(), INTEGERS[kind]
    scale = (wide.abs().amax(-1, keepdim=True) / top).clamp_(min=_TINY)
    codes = (wide / scale).round_().clamp_(-top, top).to(torch.int8)
    if kind == "int4":
        shifted = (codes + 8).view(torch.uint8)
        codes = (shifted[..., ::2] | shifted[..., 1::2] << 4).view(torch.int8)
    return torch.cat([codes.view(torch.uint8), scale.view(torch.uint8)], -1)


def unpack(packed: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Decode the output of `pack` to numbers [.., size]."""
    scale = packed[..., -_SCALE:].contiguous().view(torch.float32)
    codes = packed[..., :-_SCALE].contiguous()
    if kind == "int4":
        numbers = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).to(torch.int8) - 8
    else:
        numbers = codes.view(torch.int8)
    return (numbers.float() * scale).to(dtype)
