"""Layout and number formats of a layer's KV cache.

A cache is a tensor [blocks, kv heads, numbers of a block and head]. A block and head holds its
tokens consecutively, each a key followed by its value; in a latent cache, a token is one vector
whose first entries are the value. In int8, and in e4m3 with scales, two fp32 scales per token, for
key and value, follow the tokens. In NVFP4, a key is pairs of e2m1 codes, then its scales, and so is
a value. The formats of latents have sizes of their own (kept_latents.py).
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

__all__ = ["CODES", "KEPT", "LATENT_BYTES", "CacheForm"]

#: Number formats of a cache and their codes in the kernels: the layer's or wider floats, then
#: formats that need conversion.
KEPT = {
    torch.float32: 0,
    torch.bfloat16: 0,
    torch.float16: 0,
    torch.float8_e4m3fn: 1,
    torch.float8_e5m2: 2,
    torch.int8: 3,
}
#: Codes of formats whose dtype does not tell them: e4m3 with a scale per token and head, and NVFP4
#: with a scale per 16 numbers (the largest over 6, or the better of two), and FlashMLA's latents.
CODES = {
    "fp8_per_token_head": 4, "nvfp4": 5, "nvfp4_4over6": 6, "fp8_ds_mla": 7, "nvfp4_ds_mla": 8,
}  # fmt: skip
#: Bytes of a latent of 512 with a rotated part of 64.
LATENT_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_SCALED_E4M3 = 4
#: Numbers of NVFP4 that take as many bytes, with their scales.
_NUMBERS, _BYTES = 16, 9
_SCALES = 8


@frozen
class CacheForm:
    """Positions in a cache, in numbers of its dtype."""

    kv_heads: int
    block_size: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    latent: bool = False
    name: str = ""

    @property
    def code(self) -> int:
        """The format's code in the kernels."""
        return CODES[self.name] if self.name else KEPT[self.dtype]

    def _sized(self, numbers: int) -> int:
        """Return what so many numbers of a key or value take, in numbers of the dtype."""
        return numbers * _BYTES // _NUMBERS if self.code > _SCALED_E4M3 else numbers

    @property
    def has_scales(self) -> bool:
        """Whether tokens have scales of their own."""
        return self.code == _SCALED_E4M3 or self.dtype == torch.int8

    @property
    def token(self) -> int:
        """Numbers per token."""
        if self.name in LATENT_BYTES:
            return LATENT_BYTES[self.name]
        return self._sized(self.head_dim) + self._sized(0 if self.latent else self.value_dim)

    @property
    def values_at(self) -> int:
        """Offset of the value within a token."""
        return 0 if self.latent else self._sized(self.head_dim)

    @property
    def scales_at(self) -> int:
        """Offset of the scales within a block and head."""
        return self.block_size * self.token

    @property
    def head(self) -> int:
        """Numbers per block and head."""
        return self.scales_at + (
            self.block_size * _SCALES // self.dtype.itemsize if self.has_scales else 0
        )

    @property
    def block(self) -> int:
        """Numbers per block."""
        return self.kv_heads * self.head

    def shape(self, blocks: int) -> tuple[int, int, int]:
        """Return the shape of a cache of `blocks` blocks."""
        return blocks, self.kv_heads, self.head

    def readable(self, cache: Tensor) -> Tensor:
        """Return the cache as attention reads it."""
        return cache

    def scales(self, cache: Tensor) -> Tensor | None:
        """Return the cache as fp32, for its scales; None if there are none."""
        return cache.view(torch.float32) if self.has_scales else None

    def writable(self, cache: Tensor) -> Tensor:
        """Return the cache as it is written: 8-bit floats as bytes."""
        return cache.view(torch.uint8) if self.code in (1, 2, _SCALED_E4M3) else cache
