"""Codes of a few bits, packed into 32-bit words."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from modulm.contracts.quantization import Axis

__all__ = ["E2M1", "nibbles", "pack_words", "packed_axis", "unpack_words"]

_WORD = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: 4-bit floats by code (OCP Microscaling Formats, version 1.0).
E2M1 = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])


def packed_axis(axis: Axis, bits: int) -> Axis:
    """Return `axis` for numbers packed without gaps: 8 of 4 bits in 1 word, 32 of 3 bits in 3."""
    common = gcd(bits, _WORD)
    return axis.packed(_WORD // common, bits // common)


def unpack_words(words: Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Unpack integers along `dim`, the first in the lowest bits: uint8.

    words: int32, [..., n, ...] -> [..., 32 n / bits, ...]. `order`: indices of a word's numbers in
    the order of their bits.
    """
    moved = words.movedim(dim, -1).to(torch.int64) & 0xFFFFFFFF
    count = moved.shape[-1] * _WORD // bits
    at = torch.arange(count, device=words.device) * bits
    first, shift = at // _WORD, at % _WORD
    last = (at + bits - 1) // _WORD
    low = moved[..., first] >> shift
    codes = torch.where(last > first, low | (moved[..., last] << (_WORD - shift)), low)
    codes = (codes & ((1 << bits) - 1)).to(torch.uint8)
    if order is not None:
        positions = torch.tensor(order, device=words.device).argsort()
        codes = torch.unflatten(codes, -1, (-1, len(order)))[..., positions].flatten(-2)
    return codes.movedim(-1, dim)


def nibbles(pairs: Tensor, *, high_first: bool = False) -> Tensor:
    """Unpack two 4-bit codes per byte: uint8 [..., n] -> [..., 2 n].

    The first of a pair is in the low half of its byte, or with `high_first` in the high half.
    """
    low, high = pairs & 15, pairs >> 4
    return torch.stack([high, low] if high_first else [low, high], -1).flatten(-2)


def pack_words(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Pack integers into 32-bit words along `dim`, the first in the lowest bits: int32.

    codes: uint8, [..., n, ...]; n fills whole words, `bits` divides 32.
    """
    moved = codes.movedim(dim, -1)
    each = _WORD // bits
    packed = torch.zeros(*moved.shape[:-1], moved.shape[-1] // each, dtype=torch.int64)
    for index in range(each):
        packed |= moved[..., index::each].to(torch.int64) << (index * bits)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().movedim(-1, dim).contiguous()
