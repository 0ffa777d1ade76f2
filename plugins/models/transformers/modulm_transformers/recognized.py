"""Recognizes blocks of transformers' code that compute the same as modulm's, by trying them.

Each model file of the library has classes of its own for the same norm and the same feed-forward
block. A copy with small random weights is run beside the formula.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn import Module, Parameter

__all__ = ["GatedBlock", "GatedExperts", "gated_block", "gated_experts", "rms_norm_of"]

_EPS = ("variance_epsilon", "eps", "epsilon", "layer_norm_epsilon")
_CLOSE = 1e-5
_PARTS = ("gate_proj", "up_proj", "down_proj")
_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def rms_norm_of(module: Module) -> tuple[float, float] | None:
    """The epsilon and the offset of weights of a module that is an RMS norm, else None."""
    weight = module._parameters.get("weight")
    numbers = (getattr(module, name, None) for name in _EPS)
    eps = next((value for value in numbers if isinstance(value, float)), None)
    alone = len(module._parameters) == 1 and not module._modules and not module._buffers
    if weight is None or weight.dim() != 1 or eps is None or not alone:
        return None
    random = torch.Generator().manual_seed(0)
    size = len(weight)
    x = torch.randn(1, 3, size, generator=random)
    scale = 1 + torch.randn(size, generator=random) / 8
    result = _tried(module, {"weight": Parameter(scale, requires_grad=False)}, {}, x)
    normed = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    for offset in (0.0, 1.0):
        if _equal(result, normed * (scale + offset)):
            return eps, offset
    return None


@frozen
class GatedBlock:
    """down(act(gate(x)) * up(x)), with sizes of its linear layers."""

    hidden: int
    inner: int
    act: str
    bias: bool


def gated_block(module: Module) -> GatedBlock | None:
    """The sizes of a gated feed-forward block, or None if the module is another."""
    linears = [module._modules.get(name) for name in _PARTS]
    others = set(module._modules) - {*_PARTS, "act_fn"}
    act = getattr(module, "act_fn", None)
    if others or module._parameters or module._buffers or not callable(act):
        return None
    if not all(type(linear) is torch.nn.Linear for linear in linears):
        return None
    gate, up, _ = linears
    biases = {linear.bias is not None for linear in linears}  # type: ignore[union-attr]
    name = _activation(act)
    if name is None or len(biases) != 1 or gate.out_features != up.out_features:  # type: ignore[union-attr]
        return None
    (bias,) = biases
    small = _small(bias)
    x = torch.randn(1, 3, 8, generator=torch.Generator().manual_seed(1))
    result = _tried(module, {}, small, x)
    expected = small["down_proj"](act(small["gate_proj"](x)) * small["up_proj"](x))
    if not _equal(result, expected):
        return None
    return GatedBlock(gate.in_features, gate.out_features, name, bias)  # type: ignore[union-attr,arg-type]


@frozen
class GatedExperts:
    """Experts that are gated blocks without biases, with their number and sizes."""

    experts: int
    hidden: int
    inner: int
    act: str


def gated_experts(module: Module) -> GatedExperts | None:
    """The sizes of stacked gated experts, which are called with tokens, choices and weights of
    those, or None if the module is another.
    """
    stacks = module._parameters
    act = getattr(module, "act_fn", None)
    if set(stacks) != {"gate_up_proj", "down_proj"} or not callable(act) or module._buffers:
        return None
    gate_up, down = stacks["gate_up_proj"], stacks["down_proj"]
    name = _activation(act)
    if gate_up is None or down is None or gate_up.dim() != 3 or name not in _OF_EXPERTS:
        return None
    experts, both, hidden = gate_up.shape
    if down.shape != (experts, hidden, both // 2):
        return None
    random = torch.Generator().manual_seed(2)
    small = {
        "gate_up_proj": Parameter(torch.randn(experts, 12, 8, generator=random)),
        "down_proj": Parameter(torch.randn(experts, 8, 6, generator=random)),
    }
    x = torch.randn(5, 8, generator=random)
    ids = torch.rand(5, experts, generator=random).topk(min(2, experts)).indices
    weights = torch.rand(ids.shape, generator=random)
    tried = copy.copy(module)
    tried.__dict__["_parameters"] = dict(small)
    tried.__dict__["config"] = SimpleNamespace(_experts_implementation="eager")
    with torch.no_grad():
        expected = torch.zeros_like(x)
        for token, choice in product(range(5), range(ids.shape[1])):
            e = int(ids[token, choice])
            gate, up = (small["gate_up_proj"][e] @ x[token]).chunk(2)
            inner = small["down_proj"][e] @ (_ACTIVATIONS[name](gate) * up)
            expected[token] += weights[token, choice] * inner
        result = _called(tried, x, ids, weights)
    close = result is not None and result.shape == x.shape
    if not close or not torch.allclose(result.float(), expected, rtol=1e-4, atol=1e-4):
        return None
    return GatedExperts(experts, hidden, both // 2, name)


def _small(bias: bool) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"gate_proj": (8, 12), "up_proj": (8, 12), "down_proj": (12, 8)}
        return {
            name: torch.nn.Linear(*size, bias=bias, dtype=torch.float32, device="cpu")
            for name, size in sizes.items()
        }


def _activation(act: Any) -> str | None:
    x = _points()
    return next((name for name, f in _ACTIVATIONS.items() if _equal(_called(act, x), f(x))), None)


#: Activations that the op `fused_experts` has.
_OF_EXPERTS = ("silu", "gelu", "gelu_pytorch_tanh")


@cache
def _points() -> Tensor:
    return torch.linspace(-4, 4, 33)


def _tried(
    module: Module, parameters: Mapping[str, Parameter], modules: Mapping[str, Module], x: Tensor
) -> Tensor | None:
    """The output of a copy with other parameters and other parts."""
    tried = copy.copy(module)
    tried.__dict__["_parameters"] = dict(parameters)
    tried.__dict__["_modules"] = {**module._modules, **modules}
    return _called(tried, x)


def _called(function: Any, *inputs: Tensor) -> Tensor | None:
    try:
        result = function(*inputs)
    except Exception:
        return None
    return result if isinstance(result, Tensor) else None


def _equal(one: Tensor | None, other: Tensor) -> bool:
    if one is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one, other, rtol=_CLOSE, atol=_CLOSE)
