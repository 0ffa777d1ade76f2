"""Weights from disk into place: everything is checked on names and shapes before anything is read.

Modules start without memory. A parameter gets memory when its first tensor arrives and its module
is repacked as soon as it is complete, so that the peak is the weights and one tensor more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from modulm.contracts.loader import StoredTensor
from modulm.errors import CheckpointError

if TYPE_CHECKING:
    from modulm.contracts.loader import WeightLoader
    from modulm.nn.names import WeightNames
    from modulm.nn.weight_slots import Part, Slot, Unit

__all__ = ["WeightPlan", "fill", "plan_weights", "wanted", "weight_bytes"]

_SHOWN = 5


@frozen(eq=False)
class WeightPlan:
    """What goes where: for each tensor name, as the model calls it, the places it fills.

    `read` are the stored names that are needed, `total` the bytes that pass by in reading.
    """

    routes: Mapping[str, Sequence[tuple[Unit, Slot, Part]]]
    remaining: dict[int, int]
    units: Sequence[Unit]
    names: WeightNames
    total: int
    read: frozenset[str]


def wanted(units: Iterable[Unit]) -> Mapping[str, StoredTensor]:
    """What a checkpoint of the model could hold, by the model's names (for loaders that invent)."""
    found: dict[str, StoredTensor] = {}
    for slot in (slot for unit in units for slot in unit.slots):
        for part in slot.parts:
            size = prod(part.shape) * slot.dtype.itemsize
            dtype = str(slot.dtype).removeprefix("torch.")
            found[part.name] = StoredTensor(part.name, part.shape, dtype, "", size)
    return found


def weight_bytes(units: Iterable[Unit]) -> int:
    """Memory that the parameters take, before repacking."""
    return sum(prod(s.shape) * s.dtype.itemsize for unit in units for s in unit.slots)


def plan_weights(
    units: Sequence[Unit], index: Mapping[str, StoredTensor], names: WeightNames, where: str
) -> WeightPlan:
    """Match the checkpoint's tensors with the model's parameters.

    Raises CheckpointError that lists missing, unexpected and wrongly shaped tensors. `where` is
    the checkpoint's folder, for the message.
    """
    given = _rename(index, names, where)
    tied = {unit.path for unit in units if unit.waits_for is not None}
    routes: dict[str, list[tuple[Unit, Slot, Part]]] = {}
    remaining: dict[int, int] = {id(unit): 0 for unit in units}
    missing: list[str] = []
    wrong: list[str] = []
    for unit in units:
        for slot in unit.slots:
            parts = _choose(slot, given)
            if parts is None:
                missing += (
                    [] if slot.optional else [p.name for p in slot.parts if p.name not in given]
                )
                continue
            for part in parts:
                routes.setdefault(part.name, []).append((unit, slot, part))
                remaining[id(unit)] += 1
                stored, shape = given[part.name]
                if shape != part.shape:
                    wrong.append(
                        f"{stored.name} in {stored.file} is {list(shape)}, config.json asks for "
                        f"{list(part.shape)}"
                    )
    unexpected = [n for n in given if n not in routes and n.rpartition(".")[0] not in tied]
    _complain(where, missing, wrong, unexpected)
    read = frozenset(given[name][0].name for name in routes)
    total = sum(stored.bytes for stored in index.values())
    return WeightPlan(routes, remaining, units, names, total, read)


def fill(plan: WeightPlan, loader: WeightLoader, *, device: torch.device, progress: bool) -> None:
    """Read the weights, put each tensor in place and finish each module once it is complete."""
    done: set[int] = set()
    for unit in plan.units:
        if not plan.remaining[id(unit)]:
            _finish(unit, plan, done)
    with torch.no_grad(), _bar(plan.total, progress) as bar:
        for stored, tensor in loader.read():
            bar.update(tensor.nbytes)
            if stored not in plan.read:
                continue
            for name, piece in plan.names.apply(stored, tensor):
                for unit, slot, part in plan.routes.get(name, ()):
                    slot.fill(part, piece, device)
                    plan.remaining[id(unit)] -= 1
                    if not plan.remaining[id(unit)]:
                        _finish(unit, plan, done)
    for unit in plan.units:
        _drop_unfilled(unit)


def _finish(unit: Unit, plan: WeightPlan, done: set[int]) -> None:
    """Finish a complete module, and those that waited for it (it must be in place for them).

    A module whose weight others take is finished before them: methods that repack must leave
    tables alone.
    """
    if id(unit) in done or plan.remaining[id(unit)]:
        return
    if unit.waits_for is not None and id(unit.waits_for) not in done:
        return
    done.add(id(unit))
    if unit.finish is not None:
        unit.finish()
    for other in plan.units:
        if other.waits_for is unit:
            _finish(other, plan, done)


def _drop_unfilled(unit: Unit) -> None:
    """Optional parameters that the checkpoint lacks become None."""
    for slot in unit.slots:
        parameter = slot.module._parameters.get(slot.attribute)
        if parameter is not None and parameter.is_meta:
            slot.module.register_parameter(slot.attribute, None)


def _rename(
    index: Mapping[str, StoredTensor], names: WeightNames, where: str
) -> dict[str, tuple[StoredTensor, tuple[int, ...]]]:
    """Model's name -> (stored tensor, shape after rewriting)."""
    given: dict[str, tuple[StoredTensor, tuple[int, ...]]] = {}
    for stored in index.values():
        blank = torch.empty(stored.shape, device="meta")
        try:
            pieces = list(names.apply(stored.name, blank))
        except (RuntimeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"{where}: {stored.name} in {stored.file} has an impossible shape "
                f"{list(stored.shape)}: {error}"
            ) from error
        for name, piece in pieces:
            if name in given:
                raise CheckpointError(
                    f"{where}: {stored.name} and {given[name][0].name} are both {name}"
                )
            given[name] = (stored, tuple(piece.shape))
    return given


def _choose(slot: Slot, given: Mapping[str, Any]) -> Sequence[Part] | None:
    """The way in which the checkpoint holds the slot, or None if it does not."""
    for parts in (slot.parts, slot.whole):
        if parts and all(part.name in given for part in parts):
            return parts
    return None


def _complain(
    where: str, missing: Sequence[str], wrong: Sequence[str], unexpected: Sequence[str]
) -> None:
    problems = [
        f"{what}: {', '.join(items[:_SHOWN])}"
        + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")
        for what, items in (
            ("wrong shapes", wrong),
            ("missing weights", missing),
            ("unexpected weights", unexpected),
        )
        if items
    ]
    if problems:
        raise CheckpointError(f"{where}: the weights do not fit the model; {'; '.join(problems)}")


def _bar(total: int, progress: bool) -> Any:
    from tqdm import tqdm

    quiet = not progress or not sys.stderr.isatty()
    return tqdm(
        total=total, disable=quiet, unit="B", unit_scale=True, desc="weights", file=sys.stderr
    )
