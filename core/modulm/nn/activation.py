"""Activations by the names that config.json uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    from modulm.contracts.kernels import Ops

__all__ = ["activation", "gate_name", "gated"]

Function = Callable[[Tensor], Tensor]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


_FUNCTIONS: Mapping[str, Function] = {
    "gelu": F.gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": _relu_squared,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


def activation(name: str) -> Function:
    """The function called `name`. Raises UnsupportedError with the names there are."""
    function = _FUNCTIONS.get(name)
    if function is None:
        raise UnsupportedError(f"activation {name!r} is not known; known are {list(_FUNCTIONS)}")
    return function


def gated(name: str, ops: Ops) -> Function:
    """[tokens, 2 I] -> [tokens, I]: the activation of the first half times the second half."""
    function = activation(name)
    if function is F.silu:
        return ops.silu_and_mul
    if function is F.gelu:
        return lambda x: ops.gelu_and_mul(x, "none")
    if function is _gelu_tanh:
        return lambda x: ops.gelu_and_mul(x, "tanh")

    def apply(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return function(gate) * up

    return apply


def gate_name(name: str) -> str:
    """What the op `fused_experts` calls an activation. Raises UnsupportedError if it has none."""
    found = {F.silu: "silu", F.gelu: "gelu", _gelu_tanh: "gelu_tanh"}.get(activation(name))
    if found is None:
        raise UnsupportedError(f"experts with the activation {name!r}: not yet")
    return found
