"""Write keys and values in NVFP4: pairs of e2m1 codes, then an e4m3 scale per 16 numbers."""

from __future__ import annotations

import triton
import triton.language as tl

from modulm_kernels_triton.narrow_floats import blocks_of_e2m1

__all__ = ["NVFP4", "keep_blocks"]

#: Codes of the formats (cache.py): a scale is the largest magnitude over 6, or the better of two.
NVFP4 = tl.constexpr(5)
CHOSEN = tl.constexpr(6)


@triton.jit
def keep_blocks(
    x, base, there, HEADS: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, KEPT: tl.constexpr
):  # fmt: skip
    """Write x [HEADS, PAD] fp32, of which SIZE numbers exist and others are 0, to base [HEADS]."""
    pairs, scales = blocks_of_e2m1(x, HEADS, PAD, KEPT == CHOSEN)
    pair, group = tl.arange(0, PAD // 2), tl.arange(0, PAD // 16)
    mask = there[:, None] & (pair * 2 < SIZE)[None, :]
    tl.store(base[:, None] + pair[None, :], pairs, mask)
    mask = there[:, None] & (group * 16 < SIZE)[None, :]
    tl.store(base[:, None] + (SIZE // 2 + group)[None, :], scales, mask)
