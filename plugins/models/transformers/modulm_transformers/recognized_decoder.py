"""Recognizes layers and decoders of transformers' code that ours can run, by trying them.

Copies run with parts that record their inputs and return random values, so that what the code does
between its parts shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn import Module, ModuleList

from modulm_transformers.bridged_attention import BridgedAttention
from modulm_transformers.layers import BridgedNorm

__all__ = ["Angles", "DecoderParts", "LayerParts", "decoder_parts", "layer_parts"]

_HIDDEN = 8
_TOKENS = 3
#: A position past the trained length of every model.
_FAR = 100_000_000


@frozen(eq=False)
class LayerParts:
    """x + attn(attn_norm(x)), then x + mlp(mlp_norm(x))."""

    attn_norm: BridgedNorm
    attn: BridgedAttention
    mlp_norm: BridgedNorm
    mlp: Module


@frozen(eq=False)
class Angles:
    """A module that computes the cosines and sines of positions, and its further arguments."""

    module: Module
    arguments: tuple[Any, ...] = ()
    settings: Mapping[str, Any] = field(factory=dict)

    def compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions: [n] -> cosines and sines in fp32, [n, R] each."""
        blank = torch.zeros(1, 1, dtype=torch.float32, device=positions.device)
        cos, sin = self.module(blank, positions[None], *self.arguments, **self.settings)
        return cos[0].float(), sin[0].float()

    def is_constant(self) -> bool:
        """Whether the angles of a position depend on nothing else."""
        tried = Angles(copy.deepcopy(self.module), self.arguments, self.settings)
        device = next((b.device for b in self.module.buffers()), torch.device("cpu"))
        near = torch.arange(_TOKENS, device=device)
        alone = tried.compute(near)
        both = tried.compute(torch.cat((near, near.new_tensor([_FAR]))))
        again = tried.compute(near)
        return all(
            torch.equal(one, other[:_TOKENS]) and torch.equal(one, third)
            for one, other, third in zip(alone, both, again, strict=True)
        )


@frozen(eq=False)
class DecoderParts:
    """Embedding, layers in order, each with its angles (None: it does not rotate), final norm."""

    embedding: Module
    layers: tuple[LayerParts, ...]
    angles: tuple[Angles | None, ...]
    norm: BridgedNorm


class _Stub(Module):
    """Records its inputs, and returns what `answer` makes of the first."""

    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.answer = answer
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.results: list[Any] = []

    def forward(self, *inputs: Any, **settings: Any) -> Any:
        self.calls.append((inputs, settings))
        first = inputs[0] if inputs else settings["hidden_states"]
        self.results.append(self.answer(first))
        return self.results[-1]

    @property
    def is_alone(self) -> bool:
        """Whether it was called with one argument."""
        return [len(inputs) + len(settings) for inputs, settings in self.calls] == [1]

    @property
    def input(self) -> Tensor:
        """The tensor that it was called with, once."""
        ((inputs, settings),) = self.calls
        tensor: Tensor = inputs[0] if inputs else settings["hidden_states"]
        return tensor


@define
class _Random:
    source: torch.Generator = field(factory=lambda: torch.Generator().manual_seed(4))

    def like(self, x: Tensor) -> Tensor:
        return torch.randn(*x.shape, generator=self.source)

    def hidden(self) -> Tensor:
        return torch.randn(1, _TOKENS, _HIDDEN, generator=self.source)


def layer_parts(layer: Module) -> LayerParts | None:
    """The parts of a layer, or None if it computes something else."""
    norms = [name for name, m in layer._modules.items() if isinstance(m, BridgedNorm)]
    attns = [name for name, m in layer._modules.items() if isinstance(m, BridgedAttention)]
    rest = {
        name: m
        for name, m in layer._modules.items()
        if m is not None
        and name not in (*norms, *attns)
        and not isinstance(m, torch.nn.Dropout | torch.nn.Identity)
    }
    if (len(norms), len(attns), len(rest)) != (2, 1, 1) or layer._parameters or layer._buffers:
        return None
    (attn,), (mlp,) = attns, rest
    attention: Any = layer._modules[attn]
    for first, second in (norms, norms[::-1]):
        if _is_plain(layer, first, attn, second, mlp, attention.plain.returned):
            modules: Any = layer._modules
            return LayerParts(modules[first], attention, modules[second], rest[mlp])
    return None


@torch.no_grad()
def _is_plain(layer: Module, first: str, attn: str, second: str, mlp: str, returned: int) -> bool:
    random = _Random()
    stubs = {name: _Stub(random.like) for name in (first, second, mlp)}
    stubs[attn] = _Stub(lambda x: (random.like(x), *[None] * (returned - 1)))
    copied = copy.copy(layer)
    copied.__dict__["_modules"] = {**layer._modules, **stubs}
    x = random.hidden()
    angles = random.hidden(), random.hidden()
    given = {"attention_mask": None, "position_ids": torch.arange(_TOKENS)[None]}
    given |= {"past_key_values": None, "use_cache": False, "position_embeddings": angles}
    try:
        result = copied(x.clone(), **given, modulm=object())
        out = result[0] if isinstance(result, tuple) else result
        attended, mixed = stubs[attn].results[0][0], stubs[mlp].results[0]
        between = x + attended
        settings = stubs[attn].calls[0][1]
        return (
            torch.equal(stubs[first].input, x)
            and torch.equal(stubs[attn].input, stubs[first].results[0])
            and settings.get("position_embeddings") is angles
            and "modulm" in settings
            and torch.equal(stubs[second].input, between)
            and torch.equal(stubs[mlp].input, stubs[second].results[0])
            and all(stubs[name].is_alone for name in (first, second, mlp))
            and torch.equal(out, between + mixed)
        )
    except Exception:
        return False


@torch.no_grad()
def decoder_parts(base: Any) -> DecoderParts | None:
    """The parts of a decoder whose layers `layer_parts` knows, or None."""
    found: dict[type, list[str]] = {}
    for name, module in base._modules.items():
        if module is not None:
            found.setdefault(_kind(module), []).append(name)
    tables, lists, norms = (
        found.pop(kind, []) for kind in (torch.nn.Embedding, ModuleList, BridgedNorm)
    )
    angles = found.pop(Module, [])
    if found or (len(tables), len(lists), len(norms)) != (1, 1, 1) or base._parameters:
        return None
    found_layers = [layer_parts(layer) for layer in base._modules[lists[0]]]
    layers = [layer for layer in found_layers if layer is not None]
    if not layers or len(layers) < len(found_layers):
        return None
    embedding = base._modules[tables[0]]
    if type(embedding) is not torch.nn.Embedding:
        return None
    try:
        used = _used_angles(base, tables[0], lists[0], norms[0], angles)
    except Exception:
        return None
    if used is None:
        return None
    turns = tuple(
        each if layer.attn.plain.neox is not None else None
        for layer, each in zip(layers, used, strict=True)
    )
    needed = [layer.attn.plain.neox is not None for layer in layers]
    if any(need and each is None for need, each in zip(needed, turns, strict=True)):
        return None
    if not all(each.is_constant() for each in {*turns} if each is not None):
        return None
    return DecoderParts(embedding, tuple(layers), turns, base._modules[norms[0]])


def _kind(module: Module) -> type:
    for kind in (torch.nn.Embedding, ModuleList, BridgedNorm):
        if isinstance(module, kind):
            return kind
    # What has parameters or parts of its own may do more than compute angles.
    return type(module) if module._parameters or module._modules else Module


def _used_angles(
    base: Any, table: str, layers: str, norm: str, angles: list[str]
) -> list[Angles | None] | None:
    """Run a copy with recording parts; return each layer's angles, or None if the code does more
    than to run its parts one after another.
    """
    random = _Random()
    shape = random.hidden()
    embed = _Stub(lambda _: random.like(shape))
    last = _Stub(random.like)
    stack = [_LayerStub(layer, random.like) for layer in base._modules[layers]]
    turns = {name: _Stub(lambda _: (random.hidden(), random.hidden())) for name in angles}
    copied = copy.copy(base)
    copied.__dict__["_modules"] = {
        **base._modules, table: embed, layers: ModuleList(stack), norm: last, **turns,
    }  # fmt: skip
    positions = torch.arange(_TOKENS)[None]
    output = copied(
        input_ids=positions + 5, position_ids=positions, use_cache=False, modulm=object()
    )
    x = embed.results[0]
    if len(embed.calls) != 1 or not torch.equal(output[0], last.results[0]):
        return None
    made: dict[int, Angles] = {}
    used: list[Angles | None] = []
    for layer in stack:
        if not torch.equal(layer.input, x):
            return None
        given = layer.calls[0][1].get("position_embeddings")
        if id(given) not in made and (angle := _angles_of(base, turns, given)) is not None:
            made[id(given)] = angle
        used.append(made.get(id(given)))
        x = layer.results[0]
        x = x[0] if isinstance(x, tuple) else x
    return used if torch.equal(last.input, x) else None


class _LayerStub(_Stub):
    """Has the attributes of the layer, by which a model may choose masks and angles."""

    def __init__(self, layer: Module, answer: Callable[[Tensor], Any]) -> None:
        super().__init__(answer)
        self.__dict__["layer"] = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)


def _angles_of(base: Any, turns: Mapping[str, _Stub], given: Any) -> Angles | None:
    """The module and arguments that gave a layer's angles."""
    for name, stub in turns.items():
        for (inputs, settings), result in zip(stub.calls, stub.results, strict=True):
            if given is not result:
                continue
            more = {k: v for k, v in settings.items() if not isinstance(v, Tensor)}
            return Angles(base._modules[name], inputs[2:], more)
    return None
