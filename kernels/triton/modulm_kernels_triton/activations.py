"""Activations by number, inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["NUMBERS", "activated", "sigmoid"]

#: Activation names of the op `activate` -> numbers in the kernels; -1: identity.
NUMBERS = {
    "": -1,
    "silu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "quick_gelu": 3,
    "relu": 4,
    "relu2": 5,
    "sigmoid": 6,
    "tanh": 7,
    "xielu": 8,
}


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def activated(x, up, down, ACT: tl.constexpr):
    """Return act(x) in fp32; up, down: constants of xielu."""
    if ACT == 0:
        return x * sigmoid(x)
    if ACT == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if ACT == 2:
        return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    if ACT == 3:
        return x * sigmoid(1.702 * x)
    if ACT == 4:
        return tl.maximum(x, 0.0)
    if ACT == 5:
        above = tl.maximum(x, 0.0)
        return above * above
    if ACT == 6:
        return sigmoid(x)
    if ACT == 7:
        return _tanh(x)
    if ACT == 8:
        below = tl.exp(tl.minimum(x, 0.0)) - 1.0 - x
        return tl.where(x > 0.0, up * x * x, down * below) + 0.5 * x
    return x
