"""Activations by the names that config.json uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    from modulm.contracts.kernels import Ops

__all__ = ["activation", "gate_name", "gated"]

Function = Callable[[Tensor], Tensor]


#: config.json's names and the op `activate`'s.
_NAMES: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


def activation(name: str, ops: Ops) -> Function:
    """The function called `name`. Raises UnsupportedError with the names there are."""
    return partial(ops.activate, act=_name(name))


def gated(name: str, ops: Ops) -> Function:
    """[tokens, 2 I] -> [tokens, I]: the activation of the first half times the second half."""
    return partial(ops.act_and_mul, act=_name(name))


def gate_name(name: str) -> str:
    """What the op `fused_experts` calls an activation. Raises UnsupportedError if it has none."""
    act = _name(name)
    if act not in ("silu", "gelu", "gelu_tanh"):
        raise UnsupportedError(f"hidden_act: experts with the activation {name!r}: not yet")
    return act


def _name(name: str) -> str:
    act = _NAMES.get(name)
    if act is None:
        known = list(_NAMES)
        raise UnsupportedError(f"hidden_act: activation {name!r} is not known; known are {known}")
    return act
