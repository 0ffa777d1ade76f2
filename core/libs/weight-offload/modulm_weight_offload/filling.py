"""Fill a model whose weights partly stay in host memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from attrs import evolve, field, frozen, mutable
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module

from modulm.errors import CheckpointError, UnsupportedError
from modulm.loading.weights import fill
from modulm_weight_offload.experts import CpuExperts, mixtures_of, place_experts
from modulm_weight_offload.ring import Ring
from modulm_weight_offload.selection import (
    HostLayer,
    select_layers,
    stack_of,
    unit_bytes,
)
from modulm_weight_offload.updates import OffloadedUpdates
from modulm_weight_transfer.elsewhere import note_moved_weights
from modulm_weight_transfer.overwrite import first_unit
from modulm_weight_transfer.refill import Baseline, modules_of, numbers_of, tensors_of

if TYPE_CHECKING:
    from modulm.contracts.loader import WeightLoader
    from modulm.contracts.platform import Platform
    from modulm.loading.weights import WeightPlan
    from modulm.nn.weight_slots import Unit
    from modulm_weight_offload.contract import HostCopies
    from modulm_weight_offload.flags import OffloadConfig

__all__ = ["Offloaded", "Offloader", "offloaded_of"]

log = logging.getLogger("modulm.weights")

_GIB = 2**30
#: Alignment of weights in host memory and buffers, in bytes.
_ALIGNED = 256


@frozen(eq=False)
class Offloaded:
    """What of a model is in host memory.

    layers: numbers of its layers. memory: their weights, [bytes] uint8 each. buffers: on the
    device. is_mapped: whether the device reads `memory` where it is. mixtures: those with experts
    in host memory.
    """

    layers: tuple[int, ...] = ()
    memory: tuple[Tensor, ...] = ()
    buffers: tuple[Tensor, ...] = ()
    is_mapped: bool = False
    mixtures: tuple[CpuExperts, ...] = ()

    @property
    def host_bytes(self) -> int:
        """Weights in host memory."""
        experts = sum(mixture.host_bytes for mixture in self.mixtures)
        return experts + sum(memory.nbytes for memory in self.memory)


_OFFLOADED: WeakKeyDictionary[Any, Offloaded] = WeakKeyDictionary()


def offloaded_of(model: Any) -> Offloaded | None:
    """Return what of a model is in host memory; None if all of it is on the device."""
    return _OFFLOADED.get(model)


@mutable(eq=False)
class _Storage:
    """Memory that tensors share. copy: of it in host memory, [bytes] uint8."""

    copy: Tensor
    tensors: list[Tensor] = field(factory=list)

    def move(self, memory: Tensor) -> None:
        """Let the tensors use `memory` instead: uint8, aligned, as large as `copy`."""
        storage = memory.untyped_storage()
        for tensor in self.tensors:
            place = memory.storage_offset() // tensor.element_size() + tensor.storage_offset()
            view = torch.empty(0, dtype=tensor.dtype, device=memory.device)
            tensor.data = view.set_(storage, place, tensor.size(), tensor.stride())


class Offloader:
    """Fills a model as `modulm.loading.weights.fill` does; chosen weights stay in host memory."""

    def __init__(
        self, model: Any, flags: OffloadConfig, platform: Platform, copies: HostCopies
    ) -> None:
        self._model, self._flags = model, flags
        self._platform, self._copies = platform, copies
        #: By layer, memory that has been moved.
        self._storages: dict[int, list[_Storage]] = {}
        #: By id, tensors that have been moved.
        self._tensors: dict[int, Tensor] = {}
        #: Paths of units, and references to the memory that their weights had on the device.
        self._released: list[tuple[str, Any]] = []

    def fill(
        self, plan: WeightPlan, loader: WeightLoader, *, device: torch.device, progress: bool
    ) -> None:
        """Load the checkpoint; module by module, move what stays in host memory there.

        Raises CheckpointError if the rest does not fit the device, ConfigError if the flags choose
        nothing, UnsupportedError for layers that cannot be moved.
        """
        units = list(plan.units)
        stack = stack_of(self._model, units)
        layers = select_layers(stack, units, self._flags)
        mixtures = mixtures_of(self._model, self._flags.cpu_offload_experts)
        experts = {id(layer): mixture for mixture in mixtures for layer in mixture.stacks}
        self._check_memory(units, layers, experts)
        moving = _Moving(self, units, layers)
        with place_experts(units, experts, self._copies):
            try:
                fill(plan, loader, device=device, progress=progress)
            finally:
                moving.end()
        self._tensors.clear()
        self._check_released()
        offloaded, ring = self._place(stack, layers, device)
        made = tuple(each.attach(self._platform, self._copies, self._flags) for each in mixtures)
        _OFFLOADED[self._model] = offloaded = evolve(offloaded, mixtures=made)
        if ring is not None or made:
            numbers = {id(unit): n for n, layer in enumerate(layers) for unit in layer.units}
            places = {
                id(layer): (computed, index)
                for mixture, computed in zip(mixtures, made, strict=True)
                for index, layer in enumerate(mixture.stacks)
            }
            updates = OffloadedUpdates(self._platform, ring, numbers if ring else {}, places)
            note_moved_weights(self._model, updates)
        log.info(
            "%.2f GB of weights in host memory (%d layers, experts of %d), %.2f GB of buffers",
            offloaded.host_bytes / 1e9,
            len(layers),
            len(made),
            sum(buffer.nbytes for buffer in offloaded.buffers) / 1e9,
        )

    def _check_memory(
        self, units: Sequence[Unit], layers: Sequence[HostLayer], experts: dict[int, Any]
    ) -> None:
        """Raise CheckpointError for weights that cannot fit, before allocating memory."""
        sizes = [sum(map(unit_bytes, layer.units)) for layer in layers]
        needed = sum(map(unit_bytes, units)) - sum(sizes)
        if self._flags.backend == "prefetch":
            needed += max(sizes) * min(self._flags.offload_prefetch_step, len(sizes))
        for unit in units:
            if (mixture := experts.get(id(unit.module))) is not None:
                needed -= int(unit_bytes(unit) * mixture.host_share)
        memory = self._platform.memory()
        if needed > memory.free:
            raise CheckpointError(
                f"the weights that stay on the device need {needed / _GIB:.2f} GiB and "
                f"{self._platform.name} has {memory.free / _GIB:.2f} GiB free of "
                f"{memory.total / _GIB:.2f} GiB; keep more in host memory"
            )

    def move(self, index: int, path: str, values: Sequence[Any]) -> None:
        """Move the tensors of loaded values to host memory. Raises UnsupportedError."""
        found = {id(tensor): tensor for value in values for tensor in tensors_of(value)}
        tensors = {key: tensor for key, tensor in found.items() if key not in self._tensors}
        self._tensors |= tensors
        addresses = {tensor.data_ptr() for tensor in tensors.values()} - {0}
        if addresses & {number for value in values for number in numbers_of(value)}:
            raise UnsupportedError(
                f"offloading: {path} keeps the addresses of its weights, which would change; "
                "choose others with --offload-params or --cpu-offload-params"
            )
        moved: dict[int, _Storage] = {}
        for tensor in tensors.values():
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                continue
            address = storage.data_ptr()
            if address not in moved:
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8)
                copy.untyped_storage().copy_(storage, non_blocking=False)
                moved[address] = _Storage(copy)
                self._released.append((path, StorageWeakRef(storage)))  # type: ignore[no-untyped-call]
            moved[address].tensors.append(tensor)
        for each in moved.values():
            each.move(each.copy)
        self._storages.setdefault(index, []).extend(moved.values())

    def _check_released(self) -> None:
        """Raise UnsupportedError if something else still uses memory that was moved."""
        gc.collect()
        for path, reference in self._released:
            if not reference.expired():
                raise UnsupportedError(
                    f"offloading: something beside {path} uses its weights, which would change "
                    "their place; leave it out with --offload-params"
                )

    def _place(
        self, stack: Sequence[Module], layers: Sequence[HostLayer], device: torch.device
    ) -> tuple[Offloaded, Ring | None]:
        """Put the weights of the layers where the device can reach them; by a ring, or mapped."""
        if not layers:
            return Offloaded(), None
        memory = [self._gather(self._storages[layer.index]) for layer in layers]
        numbers = tuple(layer.index for layer in layers)
        views = None if self._flags.backend == "prefetch" else self._mapped(memory)
        if views is not None:
            for layer, view in zip(layers, views, strict=True):
                _spread(self._storages[layer.index], view)
            return Offloaded(numbers, tuple(memory), is_mapped=True), None
        steps = 1 if self._flags.backend == "uva" else self._flags.offload_prefetch_step
        size = max(len(source) for source in memory)
        buffers = [
            torch.empty(size, dtype=torch.uint8, device=device)
            for _ in range(min(steps, len(memory)))
        ]
        ring = Ring(self._copies, memory, buffers)
        for number, layer in enumerate(layers):
            _spread(self._storages[layer.index], ring.buffer_of(number))
        ring.attach(stack[0], [layer.module for layer in layers])
        return Offloaded(numbers, tuple(memory), tuple(buffers)), ring

    def _mapped(self, memory: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the memory as tensors of the device; None if it cannot read host memory."""
        views = [self._copies.mapped(each) for each in memory]
        return None if any(view is None for view in views) else [v for v in views if v is not None]

    def _gather(self, storages: Sequence[_Storage]) -> Tensor:
        """Copy a layer's weights into one piece of host memory: [bytes] uint8."""
        memory = self._copies.allocate(sum(map(_room, storages)))
        start = 0
        for storage in storages:
            memory[start : start + len(storage.copy)].copy_(storage.copy)
            start += _room(storage)
        return memory


class _Moving:
    """Moves the chosen units to host memory as they are finished.

    Units that wait for one another are moved together.
    """

    def __init__(
        self, offloader: Offloader, units: Sequence[Unit], layers: Sequence[HostLayer]
    ) -> None:
        self._offloader = offloader
        self._finishes = [(unit, unit.finish) for unit in units]
        self._layers = {id(unit): layer for layer in layers for unit in layer.units}
        self._remaining: dict[int, int] = {}
        self._chosen: dict[int, list[Unit]] = {}
        self._baselines: dict[int, Baseline] = {}
        #: Parameter -> the family that fills it.
        self._owners: dict[tuple[int, str], int] = {}
        for unit in units:
            family = id(first_unit(unit))
            self._remaining[family] = self._remaining.get(family, 0) + 1
            for slot in unit.slots:
                self._owners[id(slot.module), slot.attribute] = family
            if (layer := self._layers.get(id(unit))) is None:
                continue
            self._chosen.setdefault(family, []).append(unit)
            for module in _modules_in(layer, unit):
                self._baselines.setdefault(id(module), Baseline(module))
        for unit in units:
            if id(first_unit(unit)) in self._chosen:
                unit.finish = partial(self._finish, unit, unit.finish)

    def end(self) -> None:
        """Give the units their own functions back."""
        for unit, finish in self._finishes:
            unit.finish = finish

    def _finish(self, unit: Unit, finish: Callable[[], None] | None) -> None:
        if finish is not None:
            finish()
        family = id(first_unit(unit))
        self._remaining[family] -= 1
        if self._remaining[family]:
            return
        values: list[Any] = []
        modules: dict[int, None] = {}
        layer, path = self._layers[id(self._chosen[family][0])], self._chosen[family][0].path
        for chosen in self._chosen[family]:
            modules |= dict.fromkeys(map(id, _modules_in(layer, chosen)))
        for number in modules:
            values += [
                value
                for _, name, value in self._baselines[number].changes()
                if self._owners.get((number, name), family) == family
            ]
        self._offloader.move(layer.index, path, values)


def _modules_in(layer: HostLayer, unit: Unit) -> list[Module]:
    """Return the modules of a layer that loading a unit sets values in."""
    inside = {id(module) for module in layer.module.modules()}
    return [each for each in modules_of(unit.module, unit.finish) if id(each) in inside]


def _spread(storages: list[_Storage], memory: Tensor) -> None:
    """Let the tensors of a layer use `memory`: [bytes] uint8."""
    start = 0
    for storage in storages:
        storage.move(memory[start : start + len(storage.copy)])
        start += _room(storage)
    storages.clear()


def _room(storage: _Storage) -> int:
    """Return the bytes of a storage among others."""
    return -(-len(storage.copy) // _ALIGNED) * _ALIGNED
