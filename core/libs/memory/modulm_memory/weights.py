"""Bytes of a model's weights as a rank holds them, from shapes alone.

Quantization methods and kernels repack loaded tensors, so bytes in the file say little about bytes
in memory. A model that was built without memory knows the shapes of its parameters. One layer of
each kind is filled with plausible numbers, finished by its own method, and measured; of large
layers, a part with fewer outputs, inputs and experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor
from torch.nn import Module

from modulm.contracts.quantization import LinearKind, LinearSpec, QuantizationMethod, Shard
from modulm.nn.builder import Builder
from modulm_memory.held import HeldMemory, tensors_of

if TYPE_CHECKING:
    from modulm.loading.weights import WeightPlan
    from modulm.nn.builder import Shared
    from modulm.nn.weight_slots import Slot, Unit
    from modulm_weight_offload.planned import PlannedOffload

__all__ = ["Weights", "weigh"]

#: Values of the largest layer that is measured whole; of the largest that code after loading reads.
_WHOLE, _READ = 1 << 21, 1 << 25
#: Outputs of each part, inputs and experts of a part that stands for a larger layer. Multiples of
#: all panels and groups of the formats.
_ROWS, _COLUMNS, _EXPERTS = 128, 4096, 2
_GROUP = 256
#: Length of the pools of numbers; odd, so that rows of a matrix differ.
_POOL = 65_537


@frozen
class Weights:
    """held: bytes on the device, by what they belong to. largest: bytes of the largest module
    before it is repacked, when both forms are in memory. notes: what could not be measured. host:
    bytes that stay in host memory.
    """

    held: Mapping[str, int]
    largest: int
    notes: tuple[str, ...] = ()
    host: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.held.values())


@frozen(eq=False)
class _Scale:
    """Measures clusters of units: a unit, and those that wait for it (tied heads, absorbed maps).

    unfilled: ids of optional slots that the checkpoint does not fill. dtypes: id of a slot -> dtype
    of its values in the file.
    """

    shared: Shared
    unfilled: frozenset[int]
    dtypes: Mapping[int, torch.dtype]
    sizes: dict[object, int] = field(factory=dict)
    notes: set[str] = field(factory=set)

    def bytes_of(self, cluster: Sequence[Unit]) -> int:
        """Return the bytes that a cluster holds once it is loaded."""
        stored = sum(self.stored(unit) for unit in cluster)
        if all(unit.finish is None for unit in cluster):
            return stored
        key = tuple(self._key(unit) for unit in cluster)
        if key not in self.sizes:
            try:
                self.sizes[key] = self._measure(cluster, stored)
            except Exception as error:
                self.notes.add(
                    f"{cluster[0].path} is counted as stored: {type(error).__name__}: {error}"
                )
                self.sizes[key] = stored
        return self.sizes[key]

    def stored(self, unit: Unit) -> int:
        """Return the bytes of a unit's parameters before they are repacked."""
        filled = (slot for slot in unit.slots if id(slot) not in self.unfilled)
        return sum(prod(slot.shape) * slot.dtype.itemsize for slot in filled)

    def _key(self, unit: Unit) -> object:
        """Return a key that units share if they hold the same number of bytes."""
        slots = tuple((s.attribute, s.shape, s.dtype, id(s) in self.unfilled) for s in unit.slots)
        action = getattr(unit.finish, "func", unit.finish)
        spec, method = _layer(unit.module)
        what = getattr(action, "__qualname__", None)
        if spec is None or method is None:
            return type(unit.module), what, slots
        shape = (spec.kind, spec.inputs, spec.parts, spec.experts, spec.bias, spec.dtype)
        return type(unit.module), what, slots, shape, id(method), method.note(spec)

    def _measure(self, cluster: Sequence[Unit], stored: int) -> int:
        first, *others = cluster
        values = sum(prod(slot.shape) for slot in first.slots)
        spec, method = _layer(first.module)
        if spec is None or method is None or values <= (_READ if others else _WHOLE):
            tied = any(isinstance(_layer(unit.module)[0], LinearSpec) for unit in others)
            if not tied or values <= _WHOLE:
                return self._sample(cluster)
        if spec is None or method is None:
            return stored
        head = next((s for unit in others if (s := _layer(unit.module)[0]) is not None), None)
        if head is not None:
            return self._tied(spec, head)
        return self._part(first, spec, method)

    def _part(self, unit: Unit, spec: LinearSpec, method: QuantizationMethod) -> int:
        """Measure a part of a large layer, and multiply."""
        small = _smaller(spec)
        slots = {slot.attribute: slot for slot in unit.slots if id(slot) not in self.unfilled}
        layer = Module()
        for name, param in method.create(small).items():
            layer.register_parameter(name, None)
            if name in slots:
                example = method.example(small, name)
                self._set(layer, slots[name], param.shape(small), example)
        method.finish(layer, small)
        held = HeldMemory()
        held.add(tensors_of(layer))
        factor = spec.outputs * spec.inputs / (small.outputs * small.inputs)
        factor *= max(spec.experts, 1) / max(small.experts, 1)
        bias = spec.outputs * getattr(torch, spec.dtype).itemsize if spec.bias else 0
        return round(held.bytes * factor) + bias

    def _tied(self, table: LinearSpec, head: LinearSpec) -> int:
        """Measure a smaller table with its tied head, and multiply by the vocabulary."""
        rows = _ROWS * self.shared.mesh.tensor.size
        shared = evolve(
            self.shared, units=[], elsewhere=[], caches=[], adapters=None, notified_adapters=None
        )
        build = Builder(shared)
        small = build.embedding(table.name, rows, table.inputs)
        build.head(head.name, table.inputs, rows, tied=small)
        own = evolve(self, shared=shared, unfilled=frozenset(), dtypes={})
        return round(own._sample(shared.units) * table.outputs / rows)

    @torch.no_grad()
    def _sample(self, cluster: Sequence[Unit]) -> int:
        """Fill and finish a cluster of units, and measure what their modules hold then."""
        owners = [owner for unit in cluster if (owner := _owner(unit.finish)) is not None]
        modules = [*dict.fromkeys([*(unit.module for unit in cluster), *owners])]
        before, after = HeldMemory(), HeldMemory()
        with _restored(modules):
            for module in modules:
                before.add(tensors_of(module))
            for unit in cluster:
                for slot in unit.slots:
                    self._fill(slot)
                if unit.finish is not None:
                    unit.finish()
            for module in modules:
                after.add(tensors_of(module))
            return after.bytes - before.bytes

    def _fill(self, slot: Slot) -> None:
        if id(slot) in self.unfilled:
            slot.module.register_parameter(slot.attribute, None)
            return
        spec, method = _layer(slot.module)
        example = None
        if spec is not None and method is not None and slot.attribute != "bias":
            example = method.example(spec, slot.attribute)
        self._set(slot.module, slot, slot.shape, example)

    def _set(
        self, module: Module, slot: Slot, shape: tuple[int, ...], example: Tensor | None
    ) -> None:
        """Set a parameter of `shape` to an example, or to plausible numbers of the stored dtype."""
        if example is None:
            stored = self.dtypes.get(id(slot), slot.dtype)
            same_bits = stored.itemsize == slot.dtype.itemsize
            narrow = slot.dtype.itemsize < 2 or not slot.dtype.is_floating_point
            origin = slot.dtype if narrow or same_bits else stored
            scale = any("scale" in part.name for way in slot.ways for part in way)
            example = _plausible(shape, origin, scale="scale" in slot.attribute or scale)
        value = example.to(slot.dtype).expand(shape).contiguous().to(self.shared.device)
        module.register_parameter(slot.attribute, torch.nn.Parameter(value, requires_grad=False))


def weigh(
    units: Sequence[Unit],
    shared: Shared,
    decoder: str,
    plan: WeightPlan,
    offload: PlannedOffload,
) -> Weights:
    """Return the bytes of a model's units on this rank once they are loaded.

    decoder: path of the part of the model that has caches; other layers are encoders. plan: what
    the checkpoint fills. offload: what stays in host memory.
    """
    dtypes = {
        id(slot): getattr(torch, plan.stored[name].dtype)
        for name, routes in plan.routes.items()
        for _, slot, _ in routes
    }
    slots = [slot for unit in units for slot in unit.slots]
    unfilled = frozenset(id(slot) for slot in slots if id(slot) not in dtypes)
    scale = _Scale(shared, unfilled, dtypes)
    waiting: dict[int, list[Unit]] = defaultdict(list)
    here = {id(unit) for unit in units}
    for unit in units:
        if unit.waits_for is not None and id(unit.waits_for) in here:
            waiting[id(unit.waits_for)].append(unit)
    dependent = {id(unit) for followers in waiting.values() for unit in followers}
    held: dict[str, int] = defaultdict(int)
    copied: dict[int, int] = defaultdict(int)
    host = 0
    for unit in units:
        if id(unit) not in dependent:
            size = scale.bytes_of([*_cluster(unit, waiting)])
            away = round(size * offload.shares.get(id(unit), 0.0))
            held[_part_of(unit, decoder)] += size - away
            host += away
            if id(unit) in offload.layers:
                copied[offload.layers[id(unit)]] += away
    if offload.buffers:
        held["buffers of layers in host memory"] = offload.buffers * max(copied.values(), default=0)
    largest = max((scale.stored(unit) for unit in units), default=0)
    return Weights(dict(held), largest, tuple(sorted(scale.notes)), host)


def _cluster(unit: Unit, waiting: Mapping[int, Sequence[Unit]]) -> Iterator[Unit]:
    """Yield a unit and all units that wait for it, in the order in which they are finished."""
    yield unit
    for other in waiting.get(id(unit), ()):
        yield from _cluster(other, waiting)


def _part_of(unit: Unit, decoder: str) -> str:
    """Name what a unit belongs to."""
    spec, _ = _layer(unit.module)
    if spec is not None and spec.kind is LinearKind.EMBEDDING:
        return "embeddings"
    if spec is not None and spec.kind is LinearKind.LM_HEAD:
        return "head"
    if decoder and not unit.path.startswith(f"{decoder}."):
        return "encoders and other parts"
    return "experts" if spec is not None and spec.kind is LinearKind.EXPERT else "layers"


def _layer(module: Module) -> tuple[LinearSpec | None, QuantizationMethod | None]:
    """Return the spec and method of a layer, without the wrapper of adapters."""
    spec, method = getattr(module, "spec", None), getattr(module, "method", None)
    return spec if isinstance(spec, LinearSpec) else None, getattr(method, "base", method)


def _owner(finish: Any) -> Module | None:
    """Return the module whose bound method `finish` is, possibly in a partial."""
    owner = getattr(getattr(finish, "func", finish), "__self__", None)
    return owner if isinstance(owner, Module) else None


@contextmanager
def _restored(modules: Sequence[Module]) -> Iterator[None]:
    """Undo all changes of modules' own attributes, parameters and buffers."""
    states = [
        (vars(module), dict(vars(module)), dict(module._parameters), dict(module._buffers))
        for module in modules
    ]
    try:
        yield
    finally:
        for current, attributes, parameters, buffers in states:
            current.clear()
            current.update(attributes)
            for name, content in (("_parameters", parameters), ("_buffers", buffers)):
                current[name].clear()
                current[name].update(content)


def _smaller(spec: LinearSpec) -> LinearSpec:
    """Return a layer of the same kind with fewer outputs, inputs and experts."""
    parts = tuple(min(size, _ROWS) for size in spec.parts)
    inputs = spec.inputs
    if inputs % _GROUP == 0 and inputs > _COLUMNS:
        inputs = _COLUMNS
    shards = tuple(Shard(0, size, size) for size in parts)
    experts = min(spec.experts, _EXPERTS)
    columns = Shard(0, inputs, inputs)
    whole = Shard(0, experts, experts) if spec.experts else None
    return evolve(
        spec, inputs=inputs, parts=parts, shards=shards, input_shard=columns, experts=experts,
        expert_shard=whole, bias=False,
    )  # fmt: skip


@cache
def _pools() -> tuple[Tensor, Tensor]:
    """Return normal numbers and random bytes."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.empty(_POOL).normal_(generator=generator)
    return numbers, torch.randint(0, 256, (_POOL,), dtype=torch.uint8, generator=generator)


def _plausible(shape: tuple[int, ...], dtype: torch.dtype, *, scale: bool) -> Tensor:
    """Return numbers like those of a checkpoint: small weights, positive scales, random codes.

    Scales in bytes are exponents of 2 plus 127, as in microscaling formats.
    """
    numbers, codes = _pools()
    count = prod(shape)
    if not dtype.is_floating_point:
        size = count * dtype.itemsize
        whole = codes.repeat(-(-size // _POOL))[:size]
        if dtype is torch.uint8 and scale:
            whole = whole % 10 + 120
        return whole.clone().view(dtype).view(shape)
    pool = numbers * 0.02
    if scale or len(shape) < 2:
        pool = pool.abs() + 0.01
    return pool.to(dtype).repeat(-(-count // _POOL))[:count].clone().view(shape)
