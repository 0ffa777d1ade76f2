"""Step sizes and decays of recurrent layers."""

from __future__ import annotations

import triton
import triton.language as tl

from modulm_kernels_triton.device import target

__all__ = ["decays", "narrow_precision", "precision", "softplus"]


@triton.jit
def softplus(x):
    """Return log(1 + e^x), exact for small results, too."""
    small = tl.exp(-tl.abs(x))
    one = 1.0 + small
    rest = tl.where(one == 1.0, small, tl.log(one) * (small / tl.where(one == 1.0, 1.0, one - 1.0)))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def decays(total, SIZE: tl.constexpr):
    """Return exp of the accumulated decay from each token (last index) to each later one, else 0.

    total: [SIZE], cumulative sums including each token.
    """
    at = tl.arange(0, SIZE)
    span = total[:, None] - total[None, :]
    return tl.exp(tl.where(at[:, None] >= at[None, :], span, float("-inf")))


def precision() -> str:
    """Return the precision of fp32 products: three tf32 products if those are fast, else exact."""
    return "tf32x3" if target()[0] == "cuda" else "ieee"


def narrow_precision() -> str:
    """Return the precision that products of 16 bits name, which targets check and do not use."""
    return "tf32" if target()[0] == "cuda" else "ieee"
