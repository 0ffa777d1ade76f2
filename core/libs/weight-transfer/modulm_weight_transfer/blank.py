"""A running model without its weights, through which an update reaches the modules that run.

The model is built a second time without memory. Each of its modules is loaded as at startup (by the
checkpoint's names, sharded and quantized) and then copied into the running module. Only the module
that is being loaded takes memory.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen

from modulm.contracts.loader import WeightLoader
from modulm.contracts.quantization import LinearKind
from modulm.errors import CheckpointError, EngineError, RequestError, UnsupportedError
from modulm.loading import open_checkpoint
from modulm.loading.model import build_model, model_names, plan_checkpoint
from modulm.loading.weights import fill
from modulm_speculation.draft_model import DraftModel, rebuild_draft
from modulm_weight_transfer.deltas import DeltaSource
from modulm_weight_transfer.elsewhere import moved_weights_of
from modulm_weight_transfer.overwrite import (
    OverwritingLoader,
    first_unit,
    split_plan,
    writers_of,
)
from modulm_weight_transfer.refill import Baseline, modules_of, refill

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn import Module

    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.loader import StoredTensor
    from modulm.engine.worker.worker import Worker
    from modulm.loading import Loaded
    from modulm.loading.weights import WeightPlan
    from modulm.nn.weight_slots import Unit
    from modulm_weight_transfer.contract import TensorSource

__all__ = ["Arrived", "BlankModel", "blank_draft", "blank_model", "blank_parts"]


class Arrived(WeightLoader):
    """The tensors of an update, as a weight loader."""

    name = "update"
    api = 1

    def __init__(self, sources: Sequence[TensorSource]) -> None:
        self.sources = sources

    @property
    def sparse(self) -> frozenset[str]:
        """Names of tensors whose NaN stand for unchanged values."""
        deltas = (source.sparse for source in self.sources if isinstance(source, DeltaSource))
        return frozenset[str]().union(*deltas)

    @classmethod
    def opens(cls, path: object) -> str | None:
        return None

    def index(self) -> Mapping[str, StoredTensor]:
        return {name: tensor for source in self.sources for name, tensor in source.index().items()}

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        for source in self.sources:
            yield from source.read()


@frozen(eq=False)
class _Family:
    """Units of the running model that wait for one another, and values for their modules.

    values: (unit, module, table, name, value), see `Baseline.changes`.
    """

    units: list[Unit]
    values: list[tuple[Unit, Module, str, str, Any]]


class BlankModel:
    """A copy of a running model without weights; each loaded module refills the running one.

    loaded: the running model. checkpoint, built: what it was loaded from, and the copy. replaced:
    whether a value could not be refilled in place. Raises UnsupportedError.
    """

    def __init__(
        self, loaded: Loaded, checkpoint: Checkpoint, built: Any, device: torch.device
    ) -> None:
        self.checkpoint, self.built, self._device = checkpoint, built, device
        self.units, live = built.shared.units, loaded.units
        if not live or [unit.path for unit in live] != [unit.path for unit in self.units]:
            raise UnsupportedError(
                "the weights of this model cannot be updated, because it loads them itself"
            )
        self.loaded, self.replaced, self.changed = loaded, False, False
        self._running = {id(unit): other for unit, other in zip(self.units, live, strict=True)}
        self._moved = moved_weights_of(loaded.model)
        #: The units that are overwritten instead of loaded again.
        self._writers = writers_of(zip(self.units, live, strict=True), self._moved)
        #: By id, units of the last plan with some of their tensors: the whole units.
        self._reduced_units: dict[int, Unit] = {}
        self._baselines: dict[int, Baseline] = {}
        #: Groups of units that are applied together, keyed by the one that the others wait for:
        #: the units, how many are not loaded yet, and the modules loaded so far.
        self._members: dict[int, list[Unit]] = {}
        self._families: dict[int, int] = {}
        self._loaded: dict[int, list[tuple[Module, Module, Unit]]] = {}
        #: By group of units, values that `prepare` has loaded and `fill` copies.
        self._prepared: dict[int, _Family] = {}
        self._preparing = False
        #: Parameter -> the group of units that fills it.
        self._owners: dict[tuple[int, str], int] = {}
        self._keeps: set[tuple[int, str]] = set()
        for unit, running in zip(self.units, live, strict=True):
            if self._moved is not None and id(unit) not in self._writers:
                self._moved.check_reload(running)
            family = id(first_unit(unit))
            self._families[family] = self._families.get(family, 0) + 1
            self._members.setdefault(family, []).append(unit)
            for slot in unit.slots:
                self._owners[id(slot.module), slot.attribute] = family
            for module in modules_of(unit.module, unit.finish):
                self._baselines.setdefault(id(module), Baseline(module))
            unit.finish = partial(self._install, unit, running, unit.finish)

    def named(self, index: Mapping[str, StoredTensor]) -> dict[str, str]:
        """Map each of the model's names to the tensor's own name."""
        table = self.built.model.weights(self.built.settings)
        names: dict[str, str] = {}
        for stored in index.values():
            blank = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")
            try:
                pieces = list(model_names(table, self.built, stored.name, blank))
            except (RuntimeError, ValueError, IndexError) as error:
                message = f"{stored.name}: impossible shape {list(stored.shape)}: {error}"
                raise CheckpointError(message) from error
            names |= {name: stored.name for name, _ in pieces}
        return names

    def plan(
        self,
        loader: Arrived,
        wanted: Callable[[Unit, set[str]], bool] | None,
        in_parts: bool = False,
    ) -> WeightPlan:
        """Match tensors with all modules, or with those that `wanted` selects by their names.

        in_parts: modules that are overwritten need not be complete. Raises CheckpointError naming
        missing, unknown and mismatched tensors.
        """
        shared, units, own = self.built.shared, self.units, {id(unit) for unit in self.units}
        self._reduced_units.clear()
        if wanted is not None:
            names = set(self.named(loader.index()))
            chosen = {id(unit) for unit in units if unit.slots and wanted(unit, names)}
            units = [unit for unit in units if id(first_unit(unit)) in chosen]
            if in_parts:
                units = [self._reduced(unit, names) for unit in units]
        received = {id(unit) for unit in units}
        received |= {id(self._reduced_units[id(unit)]) for unit in units if id(unit) not in own}
        rest = [unit for unit in self.units if id(unit) not in received]
        shared = evolve(shared, units=units, elsewhere=[*shared.elsewhere, *rest])
        return plan_checkpoint(evolve(self.built, shared=shared, loader=loader), self.checkpoint)

    def _reduced(self, unit: Unit, names: set[str]) -> Unit:
        """Return a module without the tensors that `names` lacks, if it can be overwritten."""
        writers = self._writers.get(id(unit))
        if not writers:
            return unit
        slots = []
        for slot in unit.slots:
            ways = [tuple(part for part in way if part.name in names) for way in slot.ways]
            if any(ways):
                slots.append(evolve(slot, ways=(max(ways, key=len),)))
        reduced = evolve(unit, slots=slots)
        self._reduced_units[id(reduced)] = unit
        return reduced

    def refuse_sparse(self, plan: WeightPlan, sparse: frozenset[str]) -> None:
        """Raise RequestError if a delta is for a module that has to be loaded again."""
        for name, stored in plan.stored.items():
            for unit, _, _ in plan.routes[name] if stored.name in sparse else ():
                if id(self._reduced_units.get(id(unit), unit)) not in self._writers:
                    message = (
                        f"{stored.name}: its layer keeps other values than the checkpoint's (it is "
                        "quantized or rearranged), so changed values alone cannot update it; send "
                        "the whole tensor"
                    )
                    raise RequestError(message, "deltas")

    def unprepared(self, plan: WeightPlan) -> WeightPlan:
        """Return the part of a plan that `prepare` can load: modules that are not overwritten,
        and whose tensors are all known to be sent.
        """
        loads, _ = split_plan(plan, self._writers)
        optional = {
            family
            for family, units in self._members.items()
            if self._moved is not None or any(s.optional for unit in units for s in unit.slots)
        }
        return _without(loads, optional | self._prepared.keys())

    def prepare(self, plan: WeightPlan, loader: WeightLoader) -> None:
        """Load the modules of a plan of `unprepared`, and keep their values until `fill`.

        The running model does not change, so steps can go on meanwhile. If an exception stops it,
        modules that are not complete are loaded by `fill`.
        """
        self._preparing = True
        try:
            fill(plan, loader, device=self._device, progress=False)
        except BaseException:
            self._empty()
            raise
        finally:
            self._preparing = False

    def forget_prepared(self) -> None:
        """Drop all that `prepare` has loaded."""
        self._prepared.clear()

    def _empty(self) -> None:
        """Free what incomplete groups of units have loaded."""
        self._loaded.clear()
        for family, units in self._members.items():
            self._families[family] = len(units)
            for slot in (slot for unit in units for slot in unit.slots):
                slot._shared.clear()
        for baseline in self._baselines.values():
            for table, name, _ in baseline.changes():
                baseline.restore(table, name)

    def fill(self, plan: WeightPlan, loader: Arrived) -> None:
        """Overwrite or load the planned modules one by one, and copy the prepared ones."""
        self._keeps = {
            (id(slot.module), slot.attribute)
            for unit in plan.units
            for slot in unit.slots
            if slot.optional and not _any_complete(slot.ways, plan.routes)
        }
        writers = dict(self._writers)
        writers |= {new: writers[id(unit)] for new, unit in self._reduced_units.items()}
        loads, writes = split_plan(plan, writers)
        loads = _without(loads, self._prepared.keys())
        overwriting = OverwritingLoader(loader, writes, loader.sparse)
        try:
            fill(loads, overwriting, device=self._device, progress=False)
            while self._prepared:
                self._refill(self._prepared.popitem()[1])
            for unit in plan.units:
                whole = self._reduced_units.get(id(unit), unit)
                if id(whole) in self._writers:
                    self._renew_adapters(self._running[id(whole)])
        finally:
            self.changed |= overwriting.written
            if self._moved is not None:
                self._moved.store()

    def _install(self, unit: Unit, running: Unit, finish: Callable[[], None] | None) -> None:
        """Finish a module as loading does; refill the running one after all that wait for it."""
        sources = modules_of(unit.module, finish)
        targets = modules_of(running.module, running.finish)
        if finish is not None:
            finish()
        family = id(first_unit(unit))
        loaded = self._loaded.setdefault(family, [])
        loaded += [(*pair, running) for pair in zip(sources, targets, strict=True)]
        self._families[family] -= 1
        if self._families[family]:
            return
        if self._preparing:
            self._prepared[family] = self._take(family)
        else:
            self._refill(self._take(family))

    def _take(self, family: int) -> _Family:
        """Take the values of loaded modules out of them."""
        loaded, values = self._loaded.pop(family), []
        for slot in (slot for unit in self._members[family] for slot in unit.slots):
            slot._shared.clear()
        for source, target, running in loaded:
            baseline = self._baselines[id(source)]
            for table, name, value in baseline.changes():
                if self._owners.get((id(source), name), family) != family:
                    continue
                if (id(source), name) not in self._keeps:
                    values.append((running, target, table, name, value))
                baseline.restore(table, name)
        self._families[family] = len(self._members[family])
        return _Family([self._running[id(unit)] for unit in self._members[family]], values)

    @torch.inference_mode()
    def _refill(self, family: _Family) -> None:
        """Copy a family's values into its running modules, and free them one by one."""
        self.changed = True
        while family.values:
            running, target, table, name, value = family.values.pop(0)
            if self._moved is not None:
                self._moved.fetch(running)
            self.replaced |= not refill(target, table, name, value)
        for running in family.units:
            self._renew_adapters(running)

    def _renew_adapters(self, unit: Unit) -> None:
        """Update adapters that depend on the weight of the layer they wrap (DoRA)."""
        method: Any = getattr(unit.module, "method", None)
        if (around := getattr(method, "around", None)) is None:
            return
        if self._moved is not None:
            self._moved.fetch(unit)
        layer: Any = unit.module
        table = layer.spec.kind is LinearKind.EMBEDDING
        around.finish(partial(method.base.embed if table else method.base.apply, layer))


def blank_model(worker: Worker) -> BlankModel:
    """Build a worker's model without weights. Raises EngineError while its weights are released."""
    if worker.loaded is None:
        raise EngineError("the worker has released its weights: wake it up first")
    checkpoint, built = blank_parts(worker)
    return BlankModel(worker.loaded, checkpoint, built, worker.platform.device)


def blank_parts(worker: Worker) -> tuple[Checkpoint, Any]:
    """Return a worker's checkpoint, and its model without weights. Raises UnsupportedError."""
    if worker.mesh.spread is not None:
        raise UnsupportedError("weights of experts that move between ranks: not supported yet")
    checkpoint = open_checkpoint(worker.config, worker.plugins)
    masks = any(part.masks for part in worker.parts)
    built = build_model(
        worker.config, checkpoint, worker.platform, worker.plugins, worker.mesh, masks=masks
    )
    return checkpoint, built


def blank_draft(worker: Worker, draft: DraftModel) -> BlankModel:
    """Build the model of a worker's drafter without weights."""
    checkpoint, built = rebuild_draft(draft, worker.platform)
    return BlankModel(draft.loaded, checkpoint, built, worker.platform.device)


def _any_complete(ways: Sequence[Sequence[Any]], routes: Mapping[str, Any]) -> bool:
    return any(all(part.name in routes for part in way) for way in ways)


def _without(plan: WeightPlan, families: Container[int]) -> WeightPlan:
    """Return a plan without some families, and with counts of its own."""
    units = [unit for unit in plan.units if id(first_unit(unit)) not in families]
    chosen = {id(unit) for unit in units}
    routes = {
        name: kept
        for name, parts in plan.routes.items()
        if (kept := [each for each in parts if id(each[0]) in chosen])
    }
    read = {plan.stored[name].name: plan.stored[name] for name in routes}
    remaining = {id(unit): plan.remaining[id(unit)] for unit in units}
    return evolve(plan, routes=routes, units=units, read=read, remaining=remaining)
