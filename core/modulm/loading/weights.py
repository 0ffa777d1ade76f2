"""Read weights from disk into parameters. Names and shapes are checked before anything is read.

Modules start without memory. A parameter is allocated when its first tensor arrives, and a module
is repacked as soon as it is complete, so the peak memory is the weights plus one tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen

from modulm.contracts.loader import StoredTensor
from modulm.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from modulm.contracts.loader import WeightLoader
    from modulm.nn.weight_slots import Part, Slot, Unit

__all__ = ["WeightPlan", "expected_tensors", "fill", "plan_weights", "weight_bytes"]

_SHOWN = 5

#: (stored name, tensor) -> tensors under the model's names.
Naming = Callable[[str, "Tensor"], Iterable[tuple[str, "Tensor"]]]


@frozen(eq=False)
class WeightPlan:
    """Where tensors go: for each tensor name of the model, the parameters that it fills.

    `read`: stored tensors that are needed. `total`: bytes that are read. `stored`: what the routed
    tensors are stored as.
    """

    routes: Mapping[str, Sequence[tuple[Unit, Slot, Part]]]
    remaining: dict[int, int]
    units: Sequence[Unit]
    names: Naming
    total: int
    read: Mapping[str, StoredTensor]
    stored: Mapping[str, StoredTensor]


def expected_tensors(units: Iterable[Unit]) -> Mapping[str, StoredTensor]:
    """Return the tensors that a checkpoint of the model can have, by the model's names, for loaders
    that generate weights.
    """
    tensors: dict[str, StoredTensor] = {}
    for slot in (slot for unit in units for slot in unit.slots):
        for part in slot.ways[0]:
            size = prod(part.shape) * slot.dtype.itemsize
            dtype = str(slot.dtype).removeprefix("torch.")
            tensors[part.name] = StoredTensor(part.name, part.shape, dtype, "", size)
    return tensors


def weight_bytes(units: Iterable[Unit]) -> int:
    """Return the memory of the parameters before repacking."""
    return sum(prod(s.shape) * s.dtype.itemsize for unit in units for s in unit.slots)


def plan_weights(
    units: Sequence[Unit],
    index: Mapping[str, StoredTensor],
    names: Naming | None,
    where: str,
    elsewhere: Iterable[Unit] = (),
) -> WeightPlan:
    """Match the checkpoint's tensors with the model's parameters.

    names: maps stored names to the model's; None if the loader generated the tensors in the model's
    names and shapes. where: the checkpoint, for messages. elsewhere: units that other processes
    load. Raises CheckpointError listing missing, unexpected and mismatched tensors.
    """
    tensors = _rename(index, names or _as_is, where)
    ignored = {part.name for unit in elsewhere for s in unit.slots for w in s.ways for part in w}
    tied = {unit.path for unit in (*units, *elsewhere) if unit.waits_for is not None}
    routes: dict[str, list[tuple[Unit, Slot, Part]]] = {}
    remaining: dict[int, int] = {id(unit): 0 for unit in units}
    missing: list[str] = []
    wrong: list[str] = []
    for unit in units:
        for slot in unit.slots:
            ways = slot.ways if names else _made_up(slot)
            parts = next((way for way in ways if _fits(way, tensors)), None)
            if parts is None:
                stored = next((way for way in ways if all(p.name in tensors for p in way)), None)
                if stored is not None:
                    wrong += [_mismatch(part, *tensors[part.name]) for part in stored]
                elif not slot.optional:
                    missing += [part.name for part in ways[0] if part.name not in tensors]
                continue
            for part in parts:
                routes.setdefault(part.name, []).append((unit, slot, part))
            remaining[id(unit)] += len(parts)
    unexpected = [
        n
        for n in tensors
        if n not in routes and n not in ignored and n.rpartition(".")[0] not in tied
    ]
    _complain(where, [message for message in wrong if message], missing, unexpected)
    sources = {name: tensors[name][0] for name in routes}
    read = {stored.name: stored for stored in sources.values()}
    total = sum(stored.bytes for stored in index.values())
    return WeightPlan(routes, remaining, units, names or _as_is, total, read, sources)


def fill(plan: WeightPlan, loader: WeightLoader, *, device: torch.device, progress: bool) -> None:
    """Read the weights, copy each tensor to its parameters and finish each module once it is
    complete.
    """
    done: set[int] = set()
    for unit in plan.units:
        if not plan.remaining[id(unit)]:
            _finish(unit, plan, done)
    with torch.no_grad(), _bar(plan.total, progress) as bar:
        for stored, tensor in loader.read():
            bar.update(tensor.nbytes)
            if stored not in plan.read:
                continue
            for name, piece in plan.names(stored, tensor):
                for unit, slot, part in plan.routes.get(name, ()):
                    try:
                        slot.fill(part, piece, device)
                    except ValueError as error:
                        file = plan.read[stored].file
                        raise CheckpointError(f"{stored} in {file}: {error}") from error
                    plan.remaining[id(unit)] -= 1
                    if not plan.remaining[id(unit)]:
                        _finish(unit, plan, done)


def _finish(unit: Unit, plan: WeightPlan, done: set[int]) -> None:
    """Finish a complete module, and modules that were waiting for it.

    A module whose weight others share is finished before them, so methods that repack must leave
    shared tables unchanged.
    """
    waiting = unit.waits_for is not None and id(unit.waits_for) not in done
    if waiting or id(unit) in done or plan.remaining[id(unit)]:
        return
    done.add(id(unit))
    for slot in unit.slots:  # optional parameters that the checkpoint lacks
        parameter = slot.module._parameters.get(slot.attribute)
        if parameter is not None and parameter.is_meta:
            slot.module.register_parameter(slot.attribute, None)
    if unit.finish is not None:
        unit.finish()
    for other in plan.units:
        if other.waits_for is unit:
            _finish(other, plan, done)


def _as_is(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    yield name, tensor


def _made_up(slot: Slot) -> Sequence[Sequence[Part]]:
    """Return a single way: the form of the parameter itself."""
    return [[evolve(part, transform=None, shared=False) for part in slot.ways[0]]]


def _rename(
    index: Mapping[str, StoredTensor], names: Naming, where: str
) -> dict[str, tuple[StoredTensor, Tensor]]:
    """Return model's name -> (stored tensor, its rewritten form as a meta tensor)."""
    tensors: dict[str, tuple[StoredTensor, Tensor]] = {}
    for stored in index.values():
        blank = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")
        try:
            pieces = list(names(stored.name, blank))
        except (RuntimeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"{where}: {stored.name} in {stored.file} has an impossible shape "
                f"{list(stored.shape)}: {error}"
            ) from error
        for name, piece in pieces:
            if name in tensors:
                raise CheckpointError(
                    f"{where}: {stored.name} and {tensors[name][0].name} both map to {name}"
                )
            tensors[name] = (stored, piece)
    return tensors


def _fits(way: Sequence[Part], tensors: Mapping[str, tuple[StoredTensor, Tensor]]) -> bool:
    """Whether the checkpoint holds a parameter in this form."""
    return all(part.name in tensors and not _mismatch(part, *tensors[part.name]) for part in way)


def _mismatch(part: Part, stored: StoredTensor, piece: Tensor) -> str:
    """Describe the mismatch of a stored tensor's shape; "" if there is none."""
    if part.transform is None and piece.shape == part.shape:
        return ""
    try:
        part.view(piece)
    except (RuntimeError, ValueError, IndexError):
        shape = list(piece.shape)
        return f"{stored.name} in {stored.file} is {shape}, config.json asks for {list(part.shape)}"
    return ""


def _complain(
    where: str, wrong: Sequence[str], missing: Sequence[str], unexpected: Sequence[str]
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
