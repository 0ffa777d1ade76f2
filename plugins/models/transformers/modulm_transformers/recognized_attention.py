"""Recognizes attention modules of transformers' code that ours can run, by trying them.

A copy with small random weights runs with an attention function that records what it is called
with. That must be the projections of the input, normed and rotated in one of the known ways.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from inspect import Parameter as Argument
from inspect import signature
from itertools import product
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import Linear, Module, Parameter

__all__ = ["PlainAttention", "plain_attention"]

_HIDDEN = 8
#: The index of the linear layer that follows attention; queries, keys and values are before it.
_OUT = 3
_CLOSE = 1e-4
#: Arguments that do not change the result of a decoder's attention over our blocks.
_ARGUMENTS = frozenset(
    {"hidden_states", "position_embeddings", "attention_mask", "position_ids", "past_key_values"}
    | {"past_key_value", "layer_past", "cache_position", "use_cache", "output_attentions"}
)
_IGNORED = (torch.nn.Dropout, torch.nn.Identity)
#: Positions far apart: factors that depend on them show.
_POSITIONS = (0, 3, 9_000, 250_000, 30_000_000)


@frozen(eq=False)
class PlainAttention:
    """An attention module that projects its input to q, k and v, norms and rotates q and k, attends
    and projects the result.

    q, k, v, out: names of its linear layers. norms: names of the norms of q and k, or none. order:
    "heads" if each head is normed before the rotation, "last" after it, "whole" if all heads are
    normed as one vector, "" without norms. neox: whether dimension i is rotated with i + R / 2;
    None without rotation. halved: whether the angles are given as two equal halves, not as equal
    pairs. value_dim: of a head. request: the other arguments of the attention function. returned:
    length of the result, a tuple of the output and None.
    """

    q: str
    k: str
    v: str
    out: str
    norms: tuple[str, ...]
    order: str
    neox: bool | None
    halved: bool
    head_dim: int
    value_dim: int
    request: Any
    returned: int


def plain_attention(module: Module, rotated: Iterable[int]) -> PlainAttention | None:
    """Describe an attention module that ours can run, or return None.

    rotated: how many dimensions of a head the model may rotate.
    """
    linears = {name: m for name, m in module._modules.items() if type(m) is Linear}
    others = {
        name: m
        for name, m in module._modules.items()
        if name not in linears and m is not None and not isinstance(m, _IGNORED)
    }
    if len(linears) != 4 or len(others) not in (0, 2) or module._parameters or module._buffers:
        return None
    if any(norm._modules or norm._buffers for norm in others.values()):
        return None
    if not _accepts_known(module):
        return None
    before = list(linears.values())[:_OUT]
    if len({(m.in_features, m.bias is None) for m in before}) != 1:
        return None
    trial = _Trial(module, linears, others)
    for size, halved in product(sorted(rotated) or [0], (True, False)):
        if (found := trial.run(size, halved)) is not None:
            return found
    return None


def _accepts_known(module: Module) -> bool:
    parameters = signature(module.forward).parameters
    kinds = {p.kind for p in parameters.values()}
    named = {
        name
        for name, p in parameters.items()
        if p.kind not in (Argument.VAR_KEYWORD, Argument.VAR_POSITIONAL)
    }
    return Argument.VAR_KEYWORD in kinds and "hidden_states" in named and named <= _ARGUMENTS


class _Record:
    """Stands in for a step: records what the attention function gets, and returns random values."""

    def __init__(self, random: torch.Generator) -> None:
        self.random = random
        self.calls: list[tuple[Tensor, Tensor, Tensor, Any, Tensor]] = []

    def attend(self, module: Module, q: Tensor, k: Tensor, v: Tensor, request: Any) -> Tensor:
        out = torch.randn(1, q.shape[2], q.shape[1], v.shape[-1], generator=self.random)
        self.calls.append((q, k, v, request, out))
        return out


class _Trial:
    """A copy of a module with small random weights."""

    def __init__(
        self, module: Module, linears: Mapping[str, Linear], norms: Mapping[str, Module]
    ) -> None:
        self.random = torch.Generator().manual_seed(3)
        self.names, self.norm_names = tuple(linears), tuple(norms)
        self.copied = copy.copy(module)
        small: dict[str, Module] = {}
        for position, (name, linear) in enumerate(linears.items()):
            inputs, outputs = _HIDDEN, linear.out_features
            if position == _OUT:
                inputs, outputs = linear.in_features, _HIDDEN
            small[name] = self._linear(inputs, outputs, bias=linear.bias is not None)
        for name, norm in norms.items():
            small[name] = self._norm(norm)
        self.small = small
        self.copied.__dict__["_modules"] = {**module._modules, **small}

    def _linear(self, inputs: int, outputs: int, *, bias: bool) -> Module:
        layer = Linear(1, 1, bias=False, device="cpu")
        layer.in_features, layer.out_features = inputs, outputs
        layer.weight = Parameter(self._randn(outputs, inputs), requires_grad=False)
        if bias:
            layer.bias = Parameter(self._randn(outputs), requires_grad=False)
        return layer

    def _norm(self, norm: Module) -> Module:
        copied = copy.copy(norm)
        copied.__dict__["_parameters"] = {
            name: None
            if parameter is None
            else Parameter(1 + self._randn(*parameter.shape) / 8, requires_grad=False)
            for name, parameter in norm._parameters.items()
        }
        return copied

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    @torch.no_grad()
    def run(self, size: int, halved: bool) -> PlainAttention | None:
        """Try with `size` rotated dimensions; 0 stands for none."""
        try:
            return self._run(size, halved)
        except Exception:  # the code takes angles of another size, say
            return None

    def _run(self, size: int, halved: bool) -> PlainAttention | None:
        kept: PlainAttention | None = None
        for tokens, scale in ((len(_POSITIONS), 1.0), (len(_POSITIONS), 1e3), (1, 1.0)):
            found = self._called(size, halved, tokens, scale)
            if found is None or (kept is not None and _settings(found) != _settings(kept)):
                return None
            kept = found
        return kept

    def _called(self, size: int, halved: bool, tokens: int, scale: float) -> PlainAttention | None:
        x = self._randn(1, tokens, _HIDDEN) * scale
        angles = (
            self._randn(1, tokens, max(size, 2) // 2),
            self._randn(1, tokens, max(size, 2) // 2),
        )
        given = tuple(
            torch.cat((part, part), -1) if halved else part.repeat_interleave(2, -1)
            for part in angles
        )
        record = _Record(self.random)
        result = self.copied(
            hidden_states=x,
            position_embeddings=given,
            attention_mask=None,
            position_ids=torch.tensor([_POSITIONS[-tokens:]]),
            past_key_values=None,
            use_cache=False,
            modulm=record,
        )
        if len(record.calls) != 1 or not isinstance(result, tuple):
            return None
        ((q, k, v, request, attended),) = record.calls
        out = self.small[self.names[_OUT]](attended.reshape(1, tokens, -1))
        if not _close(result[0], out) or any(part is not None for part in result[1:]):
            return None
        if v.shape[:3] != k.shape[:3] or not _close(v, self._heads(2, x, v.shape[-1])):
            return None
        if q.shape[-1] != k.shape[-1] or size > q.shape[-1]:
            return None
        matched = self._match(x, q, k, angles, size)
        if matched is None:
            return None
        order, neox = matched
        names = self.norm_names if order else ()
        return PlainAttention(
            *self.names, names, order, neox, halved, q.shape[-1], v.shape[-1], request, len(result)
        )

    def _heads(self, index: int, x: Tensor, size: int) -> Tensor:
        projected: Tensor = self.small[self.names[index]](x)
        return projected.unflatten(-1, (-1, size)).transpose(1, 2)

    def _match(
        self, x: Tensor, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor], size: int
    ) -> tuple[str, bool | None] | None:
        """How q and k are made from the input: (order, neox)."""
        orders = ("heads", "whole", "last") if self.norm_names else ("",)
        turns = (True, False, None) if size else (None,)
        for order, neox in product(orders, turns):
            if all(
                _close(found, self._made(index, x, found.shape[-1], order, neox, angles))
                for index, found in enumerate((q, k))
            ):
                return order, neox
        return None

    def _made(
        self,
        index: int,
        x: Tensor,
        size: int,
        order: str,
        neox: bool | None,
        angles: tuple[Tensor, Tensor],
    ) -> Tensor | None:
        norm = self.small[self.norm_names[index]] if order else None
        made: Tensor = self.small[self.names[index]](x)
        try:
            if norm is not None and order == "whole":
                made = norm(made)
            made = made.unflatten(-1, (-1, size))
            if norm is not None and order == "heads":
                made = norm(made)
            if neox is not None:
                made = _rotated(made, angles, neox)
            if norm is not None and order == "last":
                made = norm(made)
        except RuntimeError:  # a norm of another size
            return None
        return made.transpose(1, 2)


def _rotated(x: Tensor, angles: tuple[Tensor, Tensor], neox: bool) -> Tensor:
    """Rotate the first dimensions of each head; x: [1, tokens, heads, size]."""
    cos, sin = (part[:, :, None] for part in angles)
    size = 2 * cos.shape[-1]
    part, rest = x[..., :size], x[..., size:]
    first, second = part.chunk(2, -1) if neox else part.unflatten(-1, (-1, 2)).unbind(-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2)
    return torch.cat((joined, rest), -1)


def _settings(found: PlainAttention) -> tuple[Any, ...]:
    request = found.request
    return (
        found.order, found.neox, found.returned, request.scale, request.window, request.softcap,
        request.sinks is None,
    )  # fmt: skip


def _close(found: Tensor, expected: Tensor | None) -> bool:
    if expected is None or found.shape != expected.shape:
        return False
    bound = _CLOSE * max(1.0, float(expected.abs().max()))
    return bool((found - expected).abs().max() <= bound)
