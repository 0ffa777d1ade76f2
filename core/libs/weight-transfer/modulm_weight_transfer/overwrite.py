"""Write tensors of an update straight into the running model.

Layers whose quantization method has a `writer` are converted in place, tensor by tensor, without a
copy of the layer. All other modules are loaded again and then copied (`refill`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.loader import StoredTensor, WeightLoader
from modulm_weight_transfer.refill import loaded_memory

if TYPE_CHECKING:
    from modulm.contracts.quantization import Region, Writer
    from modulm.loading.weights import WeightPlan
    from modulm.nn.weight_slots import Part, Slot, Unit
    from modulm_weight_transfer.elsewhere import MovedWeights

__all__ = ["OverwritingLoader", "first_unit", "split_plan", "writers_of"]


def first_unit(unit: Unit) -> Unit:
    """Return the last unit of the chain of units that this one waits for."""
    while unit.waits_for is not None:
        unit = unit.waits_for
    return unit


def writers_of(
    pairs: Iterable[tuple[Unit, Unit]], moved: MovedWeights | None = None
) -> dict[int, dict[str, Writer]]:
    """Return the writers of units that can be overwritten: id of a unit -> attribute -> writer.

    pairs: units of a model without weights and of the running model. Units that wait for one
    another can be overwritten together or not at all. moved: weights of the running model that are
    not where its modules use them.
    """
    families: dict[int, list[tuple[Unit, Unit]]] = {}
    for unit, running in pairs:
        families.setdefault(id(first_unit(unit)), []).append((unit, running))
    writers: dict[int, dict[str, Writer]] = {}
    for family in families.values():
        tables = [_unit_writers(*pair, moved) for pair in family]
        if all(table is not None for table in tables):
            writers |= {
                id(unit): table or {} for (unit, _), table in zip(family, tables, strict=True)
            }
    return writers


def _unit_writers(
    unit: Unit, running: Unit, moved: MovedWeights | None
) -> dict[str, Writer] | None:
    """Return a unit's writers by attribute; None if it has to be loaded again."""
    if not unit.slots:
        return {} if _is_tied(unit, running) else None
    writers: dict[str, Writer] = {}
    for blank, slot in zip(unit.slots, running.slots, strict=True):
        if slot.optional or any(part.shared for way in blank.ways for part in way):
            return None
        own = None if moved is None else moved.writer(running, slot.attribute)
        writer = own or _slot_writer(running, slot)
        if writer is None:
            return None
        if moved is not None and own is None:
            writer = partial(_fetch_and_write, moved, running, writer)
        writers[slot.attribute] = writer
    return writers


def _fetch_and_write(
    moved: MovedWeights,
    unit: Unit,
    writer: Writer,
    region: Region,
    values: Tensor,
    sparse: bool = False,
) -> None:
    moved.fetch(unit)
    writer(region, values, sparse=sparse)


def _is_tied(unit: Unit, running: Unit) -> bool:
    """Whether all that loading sets in a module without tensors is memory of the module that it
    waits for: a head that is the embedding table.
    """
    source = running.waits_for
    if source is None or source.module is running.module or unit.waits_for is None:
        return False
    table = loaded_memory(unit.waits_for.module, source.module)
    return loaded_memory(unit.module, running.module) <= table


def _slot_writer(unit: Unit, slot: Slot) -> Writer | None:
    module: Any = slot.module
    method, finish = getattr(module, "method", None), unit.finish
    if method is not None and (finish is None or getattr(finish, "func", None) == method.finish):
        writer: Writer | None = method.writer(module, module.spec, slot.attribute)
        return writer
    parameter = slot.module._parameters.get(slot.attribute)
    if finish is not None or parameter is None:
        return None
    same = (parameter.shape, parameter.dtype) == (slot.shape, slot.dtype)
    return partial(_copy, parameter) if same else None


def _copy(parameter: Tensor, region: Region, values: Tensor, sparse: bool = False) -> None:
    target = parameter[region]
    if sparse:
        values = torch.where(values.isnan(), target, values.to(target.device, target.dtype))
    target.copy_(values)


@frozen(eq=False)
class _Routes:
    """Where tensors are written. parts: model's name -> (writer, part). read: stored names."""

    plan: WeightPlan
    parts: Mapping[str, Sequence[tuple[Writer, Part]]]
    read: frozenset[str]


def split_plan(
    plan: WeightPlan, writers: Mapping[int, Mapping[str, Writer]]
) -> tuple[WeightPlan, _Routes]:
    """Split a plan into the modules that are loaded again, and those that are overwritten."""
    parts: dict[str, list[tuple[Writer, Part]]] = {}
    loaded: dict[str, list[tuple[Unit, Slot, Part]]] = {}
    for name, routes in plan.routes.items():
        for unit, slot, part in routes:
            table = writers.get(id(unit))
            if table is None:
                loaded.setdefault(name, []).append((unit, slot, part))
            else:
                parts.setdefault(name, []).append((table[slot.attribute], part))
    units = [unit for unit in plan.units if id(unit) not in writers]
    read = {plan.stored[name].name: plan.stored[name] for name in loaded}
    names = frozenset(plan.stored[name].name for name in parts)
    return evolve(plan, routes=loaded, units=units, read=read), _Routes(plan, parts, names)


class OverwritingLoader(WeightLoader):
    """Reads tensors, writes those of `routes` into the running model, and passes all on.

    sparse: stored names of tensors whose NaN stand for unchanged values.
    """

    name = "update"
    api = 1

    def __init__(
        self, loader: WeightLoader, routes: _Routes, sparse: frozenset[str] = frozenset()
    ) -> None:
        self._loader, self._routes, self._sparse = loader, routes, sparse
        #: Whether a tensor has been written.
        self.written = False

    @classmethod
    def opens(cls, path: object) -> str | None:
        return None

    def index(self) -> Mapping[str, StoredTensor]:
        return self._loader.index()

    def read(self) -> Iterator[tuple[str, Tensor]]:
        for stored, tensor in self._loader.read():
            if stored in self._routes.read:
                self.written = True
                self._write(stored, tensor)
            yield stored, tensor

    @torch.inference_mode()
    def _write(self, stored: str, tensor: Tensor) -> None:
        sparse = stored in self._sparse
        for name, piece in self._routes.plan.names(stored, tensor):
            for writer, part in self._routes.parts.get(name, ()):
                writer(part.target, part.take(piece), sparse=sparse)
