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


#: Names in config.json and the op `activate`'s names for them.
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
    """Return the activation called `name`. Raises UnsupportedError that lists the known names."""
    return partial(ops.activate, act=_name(name))


def gated(name: str, ops: Ops) -> Function:
    """[tokens, 2 I] -> [tokens, I]: activation of the first half times the second half."""
    return partial(ops.act_and_mul, act=_name(name))


def gate_name(name: str) -> str:
    """Return the name that the op `fused_experts` uses for an activation.

    Raises UnsupportedError if the op does not support it.
    """
    act = _name(name)
    if act not in ("silu", "gelu", "gelu_tanh"):
        raise UnsupportedError(f"hidden_act: not supported yet for experts: {name!r}")
    return act


def _name(name: str) -> str:
    act = _NAMES.get(name)
    if act is None:
        known = list(_NAMES)
        raise UnsupportedError(f"hidden_act: unknown activation {name!r}; known: {known}")
    return act
