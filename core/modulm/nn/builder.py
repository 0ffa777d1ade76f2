"""The builder: makes layers; knows dtype, device, ranks, quantization, attention, weight names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from attrs import evolve, field, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.attention import AttentionSpec
from modulm.contracts.model import CacheSpec
from modulm.contracts.quantization import OUTPUTS, LinearKind, LinearSpec, ParamSpec, Shard
from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn.adapted import adapted, same_method
from modulm.nn.embedding import Embedding, Head
from modulm.nn.linear import Linear, Router
from modulm.nn.norm import LayerNorm, RMSNorm
from modulm.nn.weight_layout import layout
from modulm.nn.weight_slots import Part, Slot, Unit
from modulm.parallel import ProcessGroup

if TYPE_CHECKING:
    from modulm.contracts.adapter import AdapterBank
    from modulm.contracts.attention import AttentionBackend
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.kernels import Ops
    from modulm.contracts.model import StateSpec
    from modulm.contracts.quantization import QuantizationMethod
    from modulm.nn.rotary import RotaryKind, RotaryTable
    from modulm.parallel import Mesh

__all__ = ["Builder", "Parts", "Shared"]

#: Outputs of a layer: a number, or the numbers of the parts it was fused from, by their names.
Parts = int | Mapping[str, int]
Least = int | Sequence[int | None] | None
FusedExperts = Callable[..., Tensor]

L = TypeVar("L", bound=Linear | Embedding)


@frozen(eq=False)
class Shared:
    """What a model's builders have in common: its settings and what has been made so far.

    `choose_method` gives the quantization method of a layer, `choose_backend` the attention
    backend of a spec; both remember why. `max_length` is the longest sequence admitted. Without
    `windows` every layer sees all of it. With `spans` layers take `StepLayout.spans`; "windows":
    those that have one. With `masks` layers take `StepLayout.masks`. `config`: the engine's, for
    flags of a model's package.
    """

    dtype: torch.dtype
    device: torch.device
    ops: Ops
    mesh: Mesh
    max_length: int
    choose_method: Callable[[LinearSpec], QuantizationMethod]
    choose_backend: Callable[[AttentionSpec], AttentionBackend]
    kv_dtype: str
    kv_skipped: tuple[str, ...] = ()
    calculate_kv_scales: bool = False
    windows: bool = True
    spans: bool | Literal["windows"] = False
    masks: bool = False
    adapters: AdapterBank | None = None
    #: The same, told only of layers that another stage has.
    told: AdapterBank | None = None
    config: EngineConfig | None = None
    #: The method of layers that are stored as they are.
    plain: QuantizationMethod | None = None
    units: list[Unit] = field(factory=list)
    caches: list[CacheSpec] = field(factory=list)
    ropes: dict[RotaryKind, RotaryTable] = field(factory=dict)
    elsewhere: list[Unit] = field(factory=list)
    #: Stored names of scales that layers take, whatever the method says of them.
    scales: set[str] = field(factory=set)


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

    def stage(self, here: bool) -> Builder:
        """This builder, or for what another pipeline stage has one that only learns its names."""
        if here:
            return self
        units, away = self.shared.units, self.shared.elsewhere
        shared = evolve(self.shared, caches=[], units=away, elsewhere=units)
        return evolve(self, shared=evolve(shared, adapters=None, told=self.shared.adapters))

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
        self,
        name: str,
        inputs: int,
        outputs: Parts,
        *,
        bias: bool = False,
        split: bool = True,
        least: Least = None,
    ) -> Linear:
        """A linear layer, cut by outputs between ranks unless `split` is false; least: as in
        `ProcessGroup.shard`, of every part or one for each.

        With several parts the checkpoint may hold them one by one, under their names beside
        `name`, or the whole under `name`.
        """
        spec = self._spec(name, inputs, outputs, bias=bias, split=split, least=least)
        return self._weights(Linear(spec, self._method(spec), None))

    def row_linear(self, name: str, inputs: int, outputs: int, *, bias: bool = False) -> Linear:
        """A linear layer cut by inputs: each rank multiplies its share and the sums are added."""
        group = self.shared.mesh.tensor
        share = group.shard(inputs, self.name(name))
        spec = self._spec(name, share.size, outputs, bias=bias, input_shard=share)
        reduce = group if group.size > 1 else None
        return self._weights(Linear(spec, self._method(spec), reduce))

    def pieces(
        self, name: str, inputs: int, sizes: Sequence[int], least: Least = None, **more: Any
    ) -> Linear:
        """A linear layer that is stored whole and whose outputs are several things side by side,
        each of which is cut by itself.
        """
        whole: Parts = sum(sizes)
        if self.ranks > 1:
            whole = {f"{name}.{index}": size for index, size in enumerate(sizes)}
        return self.linear(name, inputs, whole, least=least if self.ranks > 1 else None, **more)

    def share(self, total: int, least: int | None = None) -> int:
        """This rank's share of `total` heads or channels of the layer at this prefix."""
        return self.shard(total, least).size

    def shard(self, total: int, least: int | None = None) -> Shard:
        """Where that share lies."""
        return self.shared.mesh.tensor.shard(total, self.prefix, least)

    def router(
        self, name: str, inputs: int, experts: int, *, bias: bool = False, wide: bool = False
    ) -> Router:
        """What rates experts, on every rank; computed in fp32 if `wide`, whatever the model is."""
        dtype = "float32" if wide else self.dtype
        spec = self._spec(name, inputs, experts, bias=bias, kind=LinearKind.ROUTER, dtype=dtype)
        return self._weights(Router(spec, self._method(spec), None))

    def experts(
        self,
        name: str,
        experts: int,
        inputs: int,
        outputs: Parts,
        stored: str,
        *,
        bias: str | None = None,
        rows: bool = False,
    ) -> Linear:
        """`experts` linear maps stacked, which `fused_experts` applies; cut by outputs between
        ranks, or (`rows`) by inputs: what the op gives is then a part of a sum (`reduce`). Where
        experts are spread a rank has some of them whole.

        `stored` says how the checkpoint names one of them, from here, with {expert} and {part}:
        "experts.{expert}.{part}"; it may also hold the stack [experts, outputs, inputs] under
        `name`, or one for each part. `bias` is the stored name of biases [experts, outputs], if
        there are any.
        """
        parts = {name: outputs} if isinstance(outputs, int) else outputs
        paths = tuple(self.name(stored.replace("{part}", part)) for part in parts)
        group = self.shared.mesh.tensor
        own = self.shared.mesh.expert.shard(experts, f"{self.name(name)}: experts")
        spread = own.size < experts
        more: dict[str, Any] = {"kind": LinearKind.EXPERT, "experts": own.size, "expert_shard": own}
        if spread:
            spec = self._spec(name, inputs, outputs, **more)
        elif rows:
            share = group.shard(inputs, self.name(name))
            spec = self._spec(name, share.size, outputs, input_shard=share, **more)
        else:
            spec = self._spec(name, inputs, outputs, split=True, **more)
        first = tuple(path.format(expert=0) for path in paths)
        spec = evolve(spec, part_names=first, expert_names=paths)
        layer = self._weights(Linear(spec, self._method(spec), None), paths)
        if spread:  # the names of those that other ranks load
            whole = evolve(spec, experts=experts, expert_shard=None)
            self.stage(False)._weights(Linear(whole, layer.method, None), paths)
        if rows and group.size > 1 and self.shared.mesh.data.size == 1:
            layer.reduce = group
        if bias is not None:
            if spread:
                self.cut_parameter(bias, layer, "bias", (own,), (spec.outputs,))
            else:
                self.cut_parameter(bias, layer, "bias", spec.shards, before=(experts,))
        return layer

    def fused_experts(self, gate_up: Linear, down: Linear) -> FusedExperts:
        """The op `fused_experts` for two stacks, with what adapters change of it."""
        bank = self.shared.adapters
        changed = None if bank is None else bank.experts(gate_up.spec, down.spec)
        plain: FusedExperts = self.ops.fused_experts
        own = down.spec.expert_shard
        if own.size < own.whole:
            if bank is not None:
                raise UnsupportedError("enable_expert_parallel: with adapters: not yet")
            if (spread := self.shared.mesh.spread) is not None:
                return spread.layer(plain, own, self.prefix)
            return partial(_own_experts, plain, own)
        return plain if changed is None else partial(changed, plain)

    # Tables, norms, single tensors.

    def embedding(self, name: str, rows: int, hidden: int, *, scale: float = 1.0) -> Embedding:
        """A table of vectors [rows, hidden]; every rank holds all of it."""
        spec = self._spec(name, hidden, rows, kind=LinearKind.EMBEDDING)
        return self._weights(Embedding(spec, self._method(spec), scale))

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
        instead: Sequence[str] = (),
    ) -> Head:
        """The layer that gives logits; `tied` to an embedding it uses that table as its weight.
        instead: full names of layers one of which is read where nothing is stored for this one.
        """
        group = self.shared.mesh.tensor
        split = vocabulary % group.size == 0 and (tied is None or _by_rows(tied))
        spec = self._spec(name, hidden, vocabulary, bias=bias, split=split, kind=LinearKind.LM_HEAD)
        gathered = group if split else ProcessGroup()
        head = Head(spec, self._method(spec), gathered, scale=scale, cap=cap)
        if tied is None:
            return self._weights(head, instead=instead)
        unit = Unit(self.name(name), head, waits_for=self._unit_of(tied))
        unit.finish = partial(_tie, head, tied, spec)
        self.shared.units.append(unit)
        if bias:
            self.cut_parameter(f"{name}.bias", head, "bias", spec.shards)
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
        stored_dtype = dtype or self.shared.dtype
        _register(module, attribute, shape, stored_dtype)
        slot = Slot(module, attribute, shape, stored_dtype, ((Part(self.name(name), shape),),))
        self.shared.units.append(Unit(self.name(name), module, [slot]))

    def cut_parameter(
        self,
        name: str,
        module: Module,
        attribute: str,
        shards: Sequence[Shard],
        rest: tuple[int, ...] = (),
        dtype: torch.dtype | None = None,
        *,
        before: tuple[int, ...] = (),
    ) -> None:
        """The same, [*before, n, *rest], of which this rank holds `shards`, one after the other."""
        stored_dtype, path = dtype or self.shared.dtype, self.name(name)
        whole = (*before, sum(shard.whole for shard in shards), *rest)
        shape = (*before, sum(shard.size for shard in shards), *rest)
        _register(module, attribute, shape, stored_dtype)
        parts, begin, at, ahead = [], 0, 0, (slice(None),) * len(before)
        for shard in shards:
            source = slice(begin + shard.start, begin + shard.start + shard.size)
            target = slice(at, at + shard.size)
            parts.append(Part(path, whole, (*ahead, source), (*ahead, target)))
            begin, at = begin + shard.whole, at + shard.size
        slot = Slot(module, attribute, shape, stored_dtype, (tuple(parts),))
        self.shared.units.append(Unit(path, module, [slot]))

    def after(self, layer: Module, then: Callable[[], None]) -> None:
        """Call `then` once the weights of `layer` are loaded and its method has finished it."""
        source = self._unit_of(layer)
        self.shared.units.append(Unit(f"{source.path}.after", layer, [], then, source))

    # What layers share.

    def rope(self, rope: RotaryKind) -> RotaryTable:
        """The table of a kind of rotary positions, one for all layers; filled while loading."""
        return self.shared.ropes.setdefault(rope, rope.table())

    def attention_cache(
        self, spec: AttentionSpec, *, follows: str | None = None, copies: int = 1
    ) -> tuple[int, AttentionBackend]:
        """Register a layer that keeps keys and values: its cache's index and its backend.

        `follows`: see CacheSpec. copies: how many ranks would keep the same.
        """
        if not self.shared.windows:
            spec = evolve(spec, window=None)
        if self.shared.spans and (spec.window or self.shared.spans != "windows"):
            spec = evolve(spec, spans=True)
        if self.shared.masks and not spec.cross:
            spec = evolve(spec, masks=True)
        number = next((part for part in self.prefix.split(".") if part.isdigit()), "")
        skipped = {number, "sliding_window" if spec.window else number}
        if skipped & set(self.shared.kv_skipped):
            spec = evolve(spec, kv_dtype=spec.dtype, scales=False)
        spec = self.shared.mesh.cut_cache(spec, copies, self.prefix)
        return self.cache(spec, follows=follows), self.shared.choose_backend(spec)

    def cache(self, spec: AttentionSpec | StateSpec, *, follows: str | None = None) -> int:
        """Register the layer at this prefix as one that keeps something; its cache's index.

        Raises UnsupportedError for a state where tokens of a step are masked from one another.
        """
        if self.shared.masks and not isinstance(spec, AttentionSpec):
            raise UnsupportedError(f"{self.prefix}: a recurrent state sees all tokens in order")
        self.shared.caches.append(CacheSpec(self.prefix, spec, follows=follows))
        return len(self.shared.caches) - 1

    # Recording weights.

    def _spec(
        self,
        name: str,
        inputs: int,
        outputs: Parts,
        *,
        split: bool = False,
        least: Least = None,
        dtype: str | None = None,
        bias: bool = False,
        **more: Any,
    ) -> LinearSpec:
        parts = {name: outputs} if isinstance(outputs, int) else outputs
        group = self.shared.mesh.tensor if split else ProcessGroup()
        each = least if isinstance(least, Sequence) else [least] * len(parts)
        shards = tuple(
            group.shard(size, self.name(part), smallest)
            for (part, size), smallest in zip(parts.items(), each, strict=True)
        )
        return LinearSpec(
            self.name(name),
            inputs,
            tuple(shard.size for shard in shards),
            bias,
            dtype or self.dtype,
            part_names=tuple(map(self.name, parts)),
            shards=shards,
            **more,
        )

    def _method(self, spec: LinearSpec) -> QuantizationMethod:
        """What holds and applies a layer: every one passes here, and adapters with it."""
        if self.shared.told is not None:
            self.shared.told.elsewhere(spec)
        return adapted(self.shared.choose_method(spec), spec, self.shared.adapters)

    def _unit_of(self, module: Module) -> Unit:
        units = (*self.shared.units, *self.shared.elsewhere)
        return next(unit for unit in units if unit.module is module)

    def _unit(self, name: str, module: Module, **shapes: tuple[int, ...]) -> None:
        unit = Unit(self.name(name), module)
        for attribute, shape in shapes.items():
            stored = f"{name}.{attribute}" if name else attribute
            unit.slots.append(self._slot(module, attribute, shape, stored))
        self.shared.units.append(unit)

    def _slot(self, module: Module, attribute: str, shape: tuple[int, ...], stored: str) -> Slot:
        """A parameter that is stored as it is."""
        _register(module, attribute, shape, self.shared.dtype)
        part = Part(self.name(stored), shape)
        return Slot(module, attribute, shape, self.shared.dtype, ((part,),))

    def _weights(self, layer: L, paths: Sequence[str] = (), instead: Sequence[str] = ()) -> L:
        """Slots for what the layer's method wants, and for the bias; paths: as the parts lie."""
        spec, method = layer.spec, layer.method
        unit = Unit(spec.name, layer, finish=partial(method.finish, layer, spec))
        wanted = dict(method.create(spec))
        if spec.bias:
            wanted["bias"] = ParamSpec((OUTPUTS,), spec.dtype)
        for attribute, param in wanted.items():
            shape, dtype = param.shape(spec), getattr(torch, param.dtype)
            stored = param.stored or attribute
            ways = layout(param, stored, spec, paths or spec.part_names)
            for other in instead:
                ways += layout(param, stored, spec, (other,))
            _register(layer, attribute, shape, dtype)
            unit.slots.append(Slot(layer, attribute, shape, dtype, ways, param.optional))
        self.shared.units.append(unit)
        return layer


def _own_experts(
    fused: FusedExperts,
    own: Shard,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    *stacks: object,
    **more: Any,
) -> Tensor:
    """What this rank's experts add: the others have no weight in it."""
    places = ids - own.start
    here = (places >= 0) & (places < own.size)
    return fused(x, weights * here, places.where(here, 0), *stacks, **more)


def _register(module: Module, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    try:
        empty = torch.empty(shape, dtype=dtype, device="meta")
    except RuntimeError as error:
        raise CheckpointError(f"config.json: {name} of shape {list(shape)} is absurd") from error
    module.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))


def _by_rows(table: Embedding) -> bool:
    """Whether all that a table holds is cut where its rows are."""
    wanted = table.method.create(table.spec).values()
    return all(param.axes[:1] == (OUTPUTS,) for param in wanted)


def _tie(head: Head, table: Embedding, spec: LinearSpec) -> None:
    """Give the head the table's weight, or this rank's rows of it, and let its method repack what
    it then holds.
    """
    (shard,) = spec.shards
    whole = shard.size == shard.whole
    for name, tensor in table.named_parameters(recurse=False):
        rows = tensor.detach()[shard.start : shard.start + shard.size]
        own = tensor if whole else torch.nn.Parameter(rows, requires_grad=False)
        head.register_parameter(name, own)
    head.method.finish(head, spec)
    if whole and same_method(head.method, table.method):
        head.method.share(head, table)
