"""The builder: everything about where and how a model runs, so that model files need not say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from attrs import evolve, field, frozen
from torch.nn import Module

from modulm.contracts.model import CacheSpec
from modulm.contracts.quantization import LinearSpec, ParamSpec
from modulm.nn.embedding import Embedding, Head
from modulm.nn.linear import Linear, Router
from modulm.nn.norm import LayerNorm, RMSNorm
from modulm.nn.rope import Rope, RopeTable
from modulm.nn.weight_slots import Part, Slot, Unit

if TYPE_CHECKING:
    from modulm.contracts.attention import AttentionBackend, AttentionSpec
    from modulm.contracts.kernels import Ops
    from modulm.contracts.model import StateSpec
    from modulm.contracts.quantization import QuantizationMethod
    from modulm.parallel import Mesh

__all__ = ["Builder", "Parts", "Shared"]

#: Outputs of a layer: a number, or the numbers of the parts it was fused from, by their names.
Parts = int | Mapping[str, int]


@frozen(eq=False)
class Shared:
    """What a model's builders have in common: its settings and what has been made so far.

    `choose_method` gives the quantization method of a layer, `choose_backend` the attention
    backend of a spec; both remember why. `max_length` is the longest sequence admitted. Without
    `windows` every layer sees all of it.
    """

    dtype: torch.dtype
    device: torch.device
    ops: Ops
    mesh: Mesh
    max_length: int
    choose_method: Callable[[LinearSpec], QuantizationMethod]
    choose_backend: Callable[[AttentionSpec], AttentionBackend]
    kv_dtype: str
    windows: bool = True
    units: list[Unit] = field(factory=list)
    caches: list[CacheSpec] = field(factory=list)
    ropes: dict[Rope, RopeTable] = field(factory=dict)


@frozen(eq=False)
class Builder:
    """Makes the layers of a model under a prefix of weight names.

    `at("layers.0")` is a builder for what lies below. Modules are made without memory (on the
    meta device); each parameter is recorded with the names of the checkpoint tensors it takes.
    """

    shared: Shared
    prefix: str = ""

    def at(self, path: str) -> Builder:
        """The builder for the part of the model called `path`, seen from here."""
        return evolve(self, prefix=self.name(path))

    def name(self, path: str) -> str:
        """The full weight name of `path`."""
        return f"{self.prefix}.{path}" if self.prefix and path else self.prefix or path

    @property
    def ops(self) -> Ops:
        """The op table."""
        return self.shared.ops

    @property
    def dtype(self) -> str:
        """The name of the dtype that activations have."""
        return str(self.shared.dtype).removeprefix("torch.")

    @property
    def ranks(self) -> int:
        """How many ranks share each layer."""
        return self.shared.mesh.tensor.size

    # Linear layers.

    def linear(
        self, name: str, inputs: int, outputs: Parts, *, bias: bool = False, split: bool = True
    ) -> Linear:
        """A linear layer, cut by outputs between ranks unless `split` is false.

        With several parts the checkpoint may hold them one by one, under their names beside
        `name`, or the whole under `name`.
        """
        group = self.shared.mesh.tensor
        parts = {name: outputs} if isinstance(outputs, int) else dict(outputs)
        ranks = group.size if split else 1
        own = {part: self._cut(part, n, ranks) for part, n in parts.items()}
        spec = self._spec(name, inputs, tuple(own.values()), bias)
        layer = Linear(spec, self.shared.choose_method(spec), None)
        self._weights(name, layer, spec, parts, ranks=ranks)
        return layer

    def row_linear(self, name: str, inputs: int, outputs: int, *, bias: bool = False) -> Linear:
        """A linear layer cut by inputs: each rank multiplies its share and the sums are added."""
        group = self.shared.mesh.tensor
        spec = self._spec(name, self._cut(name, inputs, group.size), (outputs,), bias)
        reduce = group if group.size > 1 else None
        layer = Linear(spec, self.shared.choose_method(spec), reduce)
        self._weights(name, layer, spec, {name: outputs}, cut_inputs=group.size)
        return layer

    def router(
        self, name: str, inputs: int, experts: int, *, bias: bool = False, wide: bool = False
    ) -> Router:
        """What rates experts, on every rank; computed in fp32 if `wide`, whatever the model is."""
        spec = evolve(self._spec(name, inputs, (experts,), bias), kind="router")
        spec = evolve(spec, dtype="float32") if wide else spec
        layer = Router(spec, self.shared.choose_method(spec), None)
        self._weights(name, layer, spec, {name: experts})
        return layer

    def experts(
        self,
        name: str,
        experts: int,
        inputs: int,
        outputs: Parts,
        stored: str,
        *,
        bias: str | None = None,
    ) -> Linear:
        """`experts` linear maps stacked, which the op `fused_experts` applies.

        `stored` says how the checkpoint names one of them, from here, with {expert} and {part}:
        "experts.{expert}.{part}"; it may also hold the stack [experts, outputs, inputs] under
        `name`. `bias` is the stored name of biases [experts, outputs], if there are any.
        """
        parts = {name: outputs} if isinstance(outputs, int) else dict(outputs)
        spec = evolve(
            self._spec(name, inputs, tuple(parts.values()), bias is not None),
            kind="expert",
            experts=experts,
        )
        layer = Linear(spec, self.shared.choose_method(spec), None)
        self._stacks(name, layer, spec, parts, stored)
        if bias is not None:
            self.parameter(bias, layer, "bias", (experts, spec.outputs))
        return layer

    # Tables, norms, single tensors.

    def embedding(self, name: str, rows: int, hidden: int, *, scale: float = 1.0) -> Embedding:
        """A table of vectors [rows, hidden]; every rank holds all of it."""
        spec = evolve(self._spec(name, hidden, (rows,), False), kind="embedding")
        table = Embedding(spec, self.shared.choose_method(spec), scale)
        self._weights(name, table, spec, {name: rows})
        return table

    def head(
        self,
        name: str,
        hidden: int,
        vocabulary: int,
        *,
        tied: Embedding | None = None,
        bias: bool = False,
        scale: float = 1.0,
        cap: float = 0.0,
    ) -> Head:
        """The layer that gives logits; `tied` to an embedding it uses that table as its weight."""
        spec = evolve(self._spec(name, hidden, (vocabulary,), bias), kind="lm_head")
        method = self.shared.choose_method(spec)
        head = Head(spec, method, self.shared.mesh.tensor, scale=scale, cap=cap)
        if tied is None:
            self._weights(name, head, spec, {name: vocabulary})
            return head
        source = next(unit for unit in self.shared.units if unit.module is tied)
        unit = Unit(self.name(name), head, waits_for=source)
        unit.finish = partial(_tie, head, tied, spec)
        self.shared.units.append(unit)
        if bias:
            unit.slots.append(self._slot(head, "bias", (vocabulary,), f"{name}.bias"))
        return head

    def rms_norm(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
        """An RMS norm whose weight is stored less `offset`."""
        norm = RMSNorm(self.ops, eps, offset)
        self._unit(name, norm, weight=(size,))
        return norm

    def layer_norm(self, name: str, size: int, eps: float, *, bias: bool = True) -> LayerNorm:
        """A layer norm."""
        norm = LayerNorm(self.ops, eps)
        self._unit(name, norm, weight=(size,), **({"bias": (size,)} if bias else {}))
        return norm

    def parameters(self, name: str, module: Module, **shapes: tuple[int, ...]) -> None:
        """Give `module` plain parameters, stored under `name` and their attribute's name."""
        self._unit(name, module, **shapes)

    def parameter(
        self,
        name: str,
        module: Module,
        attribute: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Give `module` one parameter whose stored name is all of `name`."""
        kept = dtype or self.shared.dtype
        _register(module, attribute, shape, kept)
        slot = Slot(module, attribute, shape, kept, (Part(self.name(name), shape),))
        self.shared.units.append(Unit(self.name(name), module, [slot]))

    def after(self, layer: Module, then: Callable[[], None]) -> None:
        """Call `then` once the weights of `layer` are loaded and its method has finished it."""
        source = next(unit for unit in self.shared.units if unit.module is layer)
        self.shared.units.append(Unit(f"{source.path}.after", layer, [], then, source))

    # What layers share.

    def rope(self, rope: Rope) -> RopeTable:
        """The table of a kind of rotary positions, one for all layers; filled while loading."""
        return self.shared.ropes.setdefault(rope, RopeTable(rope))

    def attention_cache(self, spec: AttentionSpec) -> tuple[int, AttentionBackend]:
        """Register a layer that keeps keys and values: its cache's index and its backend."""
        if not self.shared.windows:
            spec = evolve(spec, window=None)
        return self.cache(spec), self.shared.choose_backend(spec)

    def cache(self, spec: AttentionSpec | StateSpec) -> int:
        """Register the layer at this prefix as one that keeps something; its cache's index."""
        self.shared.caches.append(CacheSpec(self.prefix, spec))
        return len(self.shared.caches) - 1

    # Recording weights.

    def _spec(self, name: str, inputs: int, parts: tuple[int, ...], bias: bool) -> LinearSpec:
        return LinearSpec(self.name(name), inputs, parts, bias, self.dtype)

    def _cut(self, name: str, total: int, ranks: int) -> int:
        return self.shared.mesh.tensor.part(total, self.name(name)) if ranks > 1 else total

    def _unit(self, name: str, module: Module, **shapes: tuple[int, ...]) -> None:
        unit = Unit(self.name(name), module)
        for attribute, shape in shapes.items():
            stored = f"{name}.{attribute}" if name else attribute
            unit.slots.append(self._slot(module, attribute, shape, stored))
        self.shared.units.append(unit)

    def _slot(self, module: Module, attribute: str, shape: tuple[int, ...], stored: str) -> Slot:
        """A parameter that is stored as it is."""
        _register(module, attribute, shape, self.shared.dtype)
        return Slot(module, attribute, shape, self.shared.dtype, (Part(self.name(stored), shape),))

    def _weights(
        self,
        name: str,
        layer: Linear | Embedding,
        spec: LinearSpec,
        parts: Mapping[str, int],
        *,
        ranks: int = 1,
        cut_inputs: int = 1,
    ) -> None:
        """Slots for what the method wants, and for the bias."""
        unit = Unit(self.name(name), layer, finish=partial(layer.method.finish, layer, spec))
        wanted = dict(layer.method.create(spec))
        if spec.bias:
            cut = 0 if ranks > 1 or len(parts) > 1 else None
            wanted["bias"] = ParamSpec((spec.outputs,), spec.dtype, output_dim=cut)
        rank = self.shared.mesh.tensor.rank
        for attribute, param in wanted.items():
            dtype = getattr(torch, param.dtype)
            _register(layer, attribute, param.shape, dtype)
            cuts = _Cuts(param, rank, ranks, cut_inputs)
            whole = cuts.whole(f"{self.name(name)}.{attribute}", tuple(parts.values()))
            single = {self.name(part): n for part, n in parts.items()}
            pieces = cuts.pieces(single, attribute) if len(parts) > 1 else whole
            unit.slots.append(
                Slot(layer, attribute, param.shape, dtype, pieces, whole, param.optional)
            )
        self.shared.units.append(unit)

    def _stacks(
        self, name: str, layer: Linear, spec: LinearSpec, parts: Mapping[str, int], stored: str
    ) -> None:
        unit = Unit(self.name(name), layer, finish=partial(layer.method.finish, layer, spec))
        for attribute, param in layer.method.create(spec).items():
            dtype = getattr(torch, param.dtype)
            _register(layer, attribute, param.shape, dtype)
            pieces: list[Part] = []
            for expert in range(spec.experts):
                start = 0
                for part, outputs in parts.items():
                    shape, target = _expert_region(param, expert, start, outputs)
                    path = self.name(stored.format(expert=expert, part=part))
                    pieces.append(Part(f"{path}.{attribute}", shape, (), target))
                    start += outputs
            full = self.name(name)
            names = (
                (full, f"{full}.{attribute}") if attribute == "weight" else (f"{full}.{attribute}",)
            )
            whole = (Part(names[0], param.shape),)
            unit.slots.append(
                Slot(layer, attribute, param.shape, dtype, tuple(pieces), whole, param.optional)
            )
        self.shared.units.append(unit)


@frozen
class _Cuts:
    """How one parameter of a linear layer is laid out in the file and on this rank."""

    param: ParamSpec
    rank: int
    ranks: int
    cut_inputs: int

    def pieces(self, parts: Mapping[str, int], attribute: str) -> tuple[Part, ...]:
        """The parts stored one by one; a parameter without output dimension is stored with each."""
        found: list[Part] = []
        start = 0
        for path, outputs in parts.items():
            found.append(self._part(f"{path}.{attribute}", outputs, 0, outputs, start))
            start += outputs // self.ranks
        return tuple(found)

    def whole(self, name: str, parts: tuple[int, ...]) -> tuple[Part, ...]:
        """All parts stored as one tensor."""
        if self.ranks == 1 or self.param.output_dim is None:
            return (self._part(name, sum(parts), 0, sum(parts), 0),)
        found: list[Part] = []
        start = target = 0
        for outputs in parts:
            found.append(self._part(name, sum(parts), start, outputs, target))
            start += outputs
            target += outputs // self.ranks
        return tuple(found)

    def _part(self, name: str, stored: int, start: int, outputs: int, target: int) -> Part:
        """`outputs` of `stored`, from `start`, of which this rank's share goes to `target`."""
        param = self.param
        shape = list(param.shape)
        source = [slice(None)] * len(shape)
        place = [slice(None)] * len(shape)
        if param.output_dim is not None:
            share = outputs // self.ranks
            first = start + (self.rank * share if self.ranks > 1 else 0)
            shape[param.output_dim] = stored // param.output_scale
            source[param.output_dim] = _span(first, share, param.output_scale)
            place[param.output_dim] = _span(target, share, param.output_scale)
        if param.input_dim is not None and self.cut_inputs > 1:
            own = shape[param.input_dim]
            shape[param.input_dim] = own * self.cut_inputs
            source[param.input_dim] = _span(self.rank * own, own, 1)
        return Part(name, tuple(shape), tuple(source), tuple(place))


def _span(start: int, length: int, scale: int) -> slice:
    return slice(start // scale, (start + length) // scale)


def _expert_region(
    param: ParamSpec, expert: int, start: int, outputs: int
) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """(shape of one expert's part in the file, where it goes in the stack)."""
    shape = list(param.shape)
    target = [slice(None)] * len(shape)
    target[0] = slice(expert, expert + 1)
    if param.output_dim is not None:
        shape[param.output_dim] = outputs // param.output_scale
        target[param.output_dim] = _span(start, outputs, param.output_scale)
    return tuple(shape[1:]), tuple(target)


def _register(module: Module, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    empty = torch.empty(shape, dtype=dtype, device="meta")
    module.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))


def _tie(head: Head, table: Embedding, spec: LinearSpec) -> None:
    """Give the head the table's weight and let its method repack what it then holds."""
    for name, tensor in table.named_parameters(recurse=False):
        head.register_parameter(name, tensor)
    head.method.finish(head, spec)
    if head.method is table.method:
        head.method.share(head, table)
