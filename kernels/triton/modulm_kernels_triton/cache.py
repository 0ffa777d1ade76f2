"""How a layer's keys and values lie in its cache, and in what format.

A cache is one tensor [blocks, kv heads, numbers of a block and head]. A block and head holds its
tokens one after the other, each a key and beside it a value; in a latent cache a token is one
vector of which the value is the beginning. In int8 two fp32 scales for each token follow behind the
tokens, a key's and a value's.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

__all__ = ["KEPT", "CacheForm"]

#: Formats of numbers in a cache and their codes in the kernels: floats of the layer or wider, then
#: those that are written in a way of their own.
KEPT = {
    torch.float32: 0,
    torch.bfloat16: 0,
    torch.float16: 0,
    torch.float8_e4m3fn: 1,
    torch.float8_e5m2: 2,
    torch.int8: 3,
}
_SCALES = 8


@frozen
class CacheForm:
    """Where things are in a cache, in numbers of its dtype."""

    kv_heads: int
    block_size: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    latent: bool = False

    @property
    def code(self) -> int:
        """The format's code in the kernels."""
        return KEPT[self.dtype]

    @property
    def token(self) -> int:
        """Numbers of a token."""
        return self.head_dim + (0 if self.latent else self.value_dim)

    @property
    def values_at(self) -> int:
        """Where in a token its value begins."""
        return 0 if self.latent else self.head_dim

    @property
    def scales_at(self) -> int:
        """Where in a block and head the scales begin."""
        return self.block_size * self.token

    @property
    def head(self) -> int:
        """Numbers of a block and head."""
        return self.scales_at + (self.block_size * _SCALES if self.dtype == torch.int8 else 0)

    @property
    def block(self) -> int:
        """Numbers of a block."""
        return self.kv_heads * self.head

    def shape(self, blocks: int) -> tuple[int, int, int]:
        """The shape of a cache of so many blocks."""
        return blocks, self.kv_heads, self.head

    def readable(self, cache: Tensor) -> Tensor:
        """The cache as attention reads it."""
        return cache

    def scales(self, cache: Tensor) -> Tensor | None:
        """The cache as fp32, for the scales in it; None if there are none."""
        return cache.view(torch.float32) if self.dtype == torch.int8 else None

    def writable(self, cache: Tensor) -> Tensor:
        """The cache as it is written: 8-bit floats as bytes."""
        return cache.view(torch.uint8) if self.code in (1, 2) else cache
