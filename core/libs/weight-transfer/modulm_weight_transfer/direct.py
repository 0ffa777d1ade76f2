"""Fill a model that was loaded before in this process without copies of its layers.

A layer is usually read into a plain weight, whose parts are joined there, and then packed: two
copies. When an engine wakes up from sleep level 2, layers whose quantization method can `allocate`
them are written by its `writer` instead, part by part, from the checkpoint's pages: one copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from modulm.loading.weights import fill
from modulm_weight_transfer.overwrite import OverwritingLoader, split_plan

if TYPE_CHECKING:
    from modulm.contracts.loader import WeightLoader
    from modulm.contracts.quantization import Writer
    from modulm.loading.weights import WeightPlan
    from modulm.nn.weight_slots import Slot, Unit

__all__ = ["fill_directly", "note_release", "was_released"]

#: Configurations of workers that have released their weights.
_RELEASED: list[ref[Any]] = []


def note_release(config: Any) -> None:
    """Note that a worker with this configuration has released its weights."""
    _RELEASED[:] = [each for each in _RELEASED if each() is not None]
    if not was_released(config):
        _RELEASED.append(ref(config))


def was_released(config: Any) -> bool:
    """Whether a worker with this very configuration has released its weights."""
    return any(each() is config for each in _RELEASED)


def fill_directly(
    plan: WeightPlan, loader: WeightLoader, *, device: torch.device, progress: bool
) -> None:
    """Read the weights as `modulm.loading.weights.fill` does, with fewer copies."""
    waited = {id(unit.waits_for) for unit in plan.units}
    alone = [unit for unit in plan.units if unit.waits_for is None and id(unit) not in waited]
    writers = {id(unit): table for unit in alone if (table := _allocate(unit, device))}
    loads, writes = split_plan(plan, writers)
    fill(loads, OverwritingLoader(loader, writes), device=device, progress=progress)


def _allocate(unit: Unit, device: torch.device) -> dict[str, Writer] | None:
    """Allocate a unit as it is once loaded; returns its writers, None if it cannot be done."""
    module: Any = unit.module
    method = getattr(module, "method", None)
    if method is None or getattr(unit.finish, "func", None) != method.finish:
        return None
    if any(slot.module is not module or _is_special(slot) for slot in unit.slots):
        return None
    if not method.allocate(module, module.spec):
        return None
    for slot in unit.slots:
        if slot.attribute == "bias":
            memory = torch.empty(slot.shape, dtype=slot.dtype, device=device)
            module.register_parameter("bias", torch.nn.Parameter(memory, requires_grad=False))
    names = [slot.attribute for slot in unit.slots]
    return {name: method.writer(module, module.spec, name) for name in names}


def _is_special(slot: Slot) -> bool:
    """Whether a parameter may be missing, or have parts that must be equal."""
    shared = any(part.shared for way in slot.ways for part in way)
    return slot.optional or shared or slot.attribute not in ("weight", "bias")
