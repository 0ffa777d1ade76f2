"""Builder: creates a model's layers for a dtype, device, ranks, quantization and attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

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

#: Outputs of a layer: a number, or part name -> number for fused layers.
Parts = int | Mapping[str, int]
Least = int | Sequence[int | None] | None
FusedExperts = Callable[..., Tensor]

L = TypeVar("L", bound=Linear | Embedding)


@frozen(eq=False)
class Shared:
    """State shared by all builders of a model: settings, and what was created so far.

    choose_method: returns a layer's quantization method. choose_backend: returns a spec's attention
    backend. Both record the reason. max_length: maximum sequence length. windows: whether sliding
    windows apply. spans: whether layers use `StepLayout.spans`; "windows": only those with a
    window. masks: whether layers use `StepLayout.masks`. config: the engine's, for flags of a
    model's package.
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
    #: Bank that is only notified of layers in other pipeline stages.
    notified_adapters: AdapterBank | None = None
    config: EngineConfig | None = None
    #: The method of unquantized layers.
    plain: QuantizationMethod | None = None
    units: list[Unit] = field(factory=list)
    caches: list[CacheSpec] = field(factory=list)
    ropes: dict[RotaryKind, RotaryTable] = field(factory=dict)
    elsewhere: list[Unit] = field(factory=list)
    #: Stored names of scales that layers use, even if the method does not need them.
    scales: set[str] = field(factory=set)


@frozen(eq=False)
class Builder:
    """Creates a model's layers under a prefix of weight names.

    `at("layers.0")` returns the builder for a nested prefix. Modules are created on the meta
    device; each parameter is recorded with the names of its checkpoint tensors.
    """

    shared: Shared
    prefix: str = ""

    def at(self, path: str) -> Builder:
        """Return the builder for `path` below this prefix."""
        return evolve(self, prefix=self.name(path))

    def stage(self, here: bool) -> Builder:
        """Return this builder, or for other pipeline stages one that only records names."""
        if here:
            return self
        units, away, adapters = self.shared.units, self.shared.elsewhere, self.shared.adapters
        shared = evolve(self.shared, caches=[], units=away, elsewhere=units)
        return evolve(self, shared=evolve(shared, adapters=None, notified_adapters=adapters))

    def name(self, path: str) -> str:
        """Return the full weight name of `path`."""
        return f"{self.prefix}.{path}" if self.prefix and path else self.prefix or path

    @property
    def ops(self) -> Ops:
        """The op table."""
        return self.shared.ops

    @property
    def dtype(self) -> str:
        """The name of the activations' dtype."""
        return str(self.shared.dtype).removeprefix("torch.")

    @property
    def ranks(self) -> int:
        """Number of ranks that share each layer."""
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
        """Create a linear layer, split by outputs over ranks unless `split` is False.

        least: as in `ProcessGroup.shard`, for all parts or one for each. The checkpoint may store
        several parts separately, under their names next to `name`, or fused under `name`.
        """
        spec = self._spec(name, inputs, outputs, bias=bias, split=split, least=least)
        return self._weights(Linear(spec, self._method(spec), None))

    def row_linear(self, name: str, inputs: int, outputs: int, *, bias: bool = False) -> Linear:
        """Create a linear layer split by inputs, whose partial sums are added over ranks."""
        group = self.shared.mesh.tensor
        share = group.shard(inputs, self.name(name))
        spec = self._spec(name, share.size, outputs, bias=bias, input_shard=share)
        reduce = group if group.size > 1 else None
        return self._weights(Linear(spec, self._method(spec), reduce))

    def pieces(
        self, name: str, inputs: int, sizes: Sequence[int], least: Least = None, **more: Any
    ) -> Linear:
        """Create a linear layer that is stored fused and whose parts are split separately."""
        whole: Parts = sum(sizes)
        if self.ranks > 1:
            whole = {f"{name}.{index}": size for index, size in enumerate(sizes)}
        return self.linear(name, inputs, whole, least=least if self.ranks > 1 else None, **more)

    def share(self, total: int, least: int | None = None) -> int:
        """Return this rank's number of `total` heads or channels at this prefix."""
        return self.shard(total, least).size

    def shard(self, total: int, least: int | None = None) -> Shard:
        """Return the position of this rank's share of `total`."""
        return self.shared.mesh.tensor.shard(total, self.prefix, least)

    def router(
        self, name: str, inputs: int, experts: int, *, bias: bool = False, wide: bool = False
    ) -> Router:
        """Create a router, replicated on every rank; it computes in fp32 if `wide`."""
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
        """Create stacked linear layers for the op `fused_experts`.

        They are split by outputs over ranks, or by inputs if `rows`; the op then returns partial
        sums (`reduce`). With expert parallelism a rank has whole experts instead.

        stored: name of an expert's tensor below this prefix, with {expert} and {part}:
        "experts.{expert}.{part}". The checkpoint may also store the stack [experts, outputs,
        inputs] under `name`, or one per part. bias: stored name of biases [experts, outputs].
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
        """Return the op `fused_experts` for two stacks, including adapters."""
        bank = self.shared.adapters
        changed = None if bank is None else bank.experts(gate_up.spec, down.spec)
        plain: FusedExperts = self.ops.fused_experts
        own = down.spec.expert_shard
        if own.size < own.total:
            if bank is not None:
                raise UnsupportedError("enable_expert_parallel: with adapters: not supported yet")
            if (spread := self.shared.mesh.spread) is not None:
                return spread.layer(plain, own, self.prefix)
            return partial(_own_experts, plain, own)
        return plain if changed is None else partial(changed, plain)

    # Tables, norms, single tensors.

    def embedding(self, name: str, rows: int, hidden: int, *, scale: float = 1.0) -> Embedding:
        """Create an embedding table [rows, hidden], replicated on every rank."""
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
        """Create the LM head. tied: the embedding whose table is its weight, or None.

        instead: full names of layers to read if nothing is stored for this one.
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
        """Create an RMS norm; its stored weight excludes `offset`."""
        return cast("RMSNorm", self._norm(name, RMSNorm(self.ops, eps, offset), weight=(size,)))

    def layer_norm(self, name: str, size: int, eps: float, *, bias: bool = True) -> LayerNorm:
        """Create a layer norm."""
        shapes = {"weight": (size,), "bias": (size,)} if bias else {"weight": (size,)}
        return cast("LayerNorm", self._norm(name, LayerNorm(self.ops, eps), **shapes))

    def _norm(self, name: str, norm: Any, **shapes: tuple[int, ...]) -> Any:
        """Add a norm's parameters; returns it, or what the adapter bank puts in its place."""
        self._unit(name, norm, **shapes)
        return norm if (bank := self.shared.adapters) is None else bank.norm(self.name(name), norm)

    def parameters(self, name: str, module: Module, **shapes: tuple[int, ...]) -> None:
        """Add unquantized parameters to `module`, stored under `name` and the attribute's name."""
        self._unit(name, module, **shapes)

    def parameter(
        self,
        name: str,
        module: Module,
        attribute: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Add a parameter to `module`. name: its full stored name."""
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
        """Add a parameter [*before, n, *rest], of which this rank stores `shards`, concatenated."""
        stored_dtype, path = dtype or self.shared.dtype, self.name(name)
        whole = (*before, sum(shard.total for shard in shards), *rest)
        shape = (*before, sum(shard.size for shard in shards), *rest)
        _register(module, attribute, shape, stored_dtype)
        parts, begin, at, ahead = [], 0, 0, (slice(None),) * len(before)
        for shard in shards:
            source = slice(begin + shard.start, begin + shard.start + shard.size)
            target = slice(at, at + shard.size)
            parts.append(Part(path, whole, (*ahead, source), (*ahead, target)))
            begin, at = begin + shard.total, at + shard.size
        slot = Slot(module, attribute, shape, stored_dtype, (tuple(parts),))
        self.shared.units.append(Unit(path, module, [slot]))

    def after(self, layer: Module, then: Callable[[], None]) -> None:
        """Call `then` once `layer` is loaded and finished."""
        source = self._unit_of(layer)
        self.shared.units.append(Unit(f"{source.path}.after", layer, [], then, source))

    # What layers share.

    def rope(self, rope: RotaryKind) -> RotaryTable:
        """Return the table of a kind of rotary positions, shared by all layers."""
        return self.shared.ropes.setdefault(rope, rope.table())

    def attention_cache(
        self, spec: AttentionSpec, *, follows: str | None = None, copies: int = 1
    ) -> tuple[int, AttentionBackend]:
        """Register the KV cache of the layer at this prefix; return its index and backend.

        follows: see CacheSpec. copies: number of ranks that would store the same.
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
        """Register a cache of the layer at this prefix; return its index.

        Raises UnsupportedError for recurrent states in models whose steps may have masks.
        """
        if self.shared.masks and not isinstance(spec, AttentionSpec):
            raise UnsupportedError(f"{self.prefix}: a recurrent state needs all tokens in order")
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
        """Return a layer's quantization method, wrapped by adapters. All layers pass here."""
        if self.shared.notified_adapters is not None:
            self.shared.notified_adapters.elsewhere(spec)
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
        """Create the slot of an unquantized parameter."""
        _register(module, attribute, shape, self.shared.dtype)
        part = Part(self.name(stored), shape)
        return Slot(module, attribute, shape, self.shared.dtype, ((part,),))

    def _weights(self, layer: L, paths: Sequence[str] = (), instead: Sequence[str] = ()) -> L:
        """Create the slots of the method's parameters and the bias. paths: of the parts."""
        spec, method = layer.spec, layer.method
        unit = Unit(spec.name, layer, finish=partial(method.finish, layer, spec))
        params = dict(method.create(spec))
        if spec.bias:
            params["bias"] = ParamSpec((OUTPUTS,), spec.dtype)
        for attribute, param in params.items():
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
    """Run this rank's experts, with zero weights for the others."""
    places = ids - own.start
    here = (places >= 0) & (places < own.size)
    return fused(x, weights * here, places.where(here, 0), *stacks, **more)


def _register(module: Module, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    try:
        empty = torch.empty(shape, dtype=dtype, device="meta")
    except RuntimeError as error:
        raise CheckpointError(
            f"config.json: {name} of shape {list(shape)} is implausible"
        ) from error
    module.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))


def _by_rows(table: Embedding) -> bool:
    """Whether all parameters of a table are split along its rows."""
    params = table.method.create(table.spec).values()
    return all(param.axes[:1] == (OUTPUTS,) for param in params)


def _tie(head: Head, table: Embedding, spec: LinearSpec) -> None:
    """Copy the table's weight, or this rank's rows of it, to the head and repack it."""
    (shard,) = spec.shards
    whole = shard.size == shard.total
    for name, tensor in table.named_parameters(recurse=False):
        rows = tensor.detach()[shard.start : shard.start + shard.size]
        own = tensor if whole else torch.nn.Parameter(rows, requires_grad=False)
        head.register_parameter(name, own)
    head.method.finish(head, spec)
    if whole and same_method(head.method, table.method):
        head.method.share(head, table)
