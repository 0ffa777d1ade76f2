"""The worker's half of weight updates: tensors are checked, repacked and copied into the model.

The model is built a second time without memory. Each of its modules is loaded as at startup (by the
checkpoint's names, sharded and quantized) and then copied into the running module. Only the module
that is being loaded takes memory.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from attrs import evolve

from modulm.contracts.loader import WeightLoader
from modulm.contracts.quantization import LinearKind
from modulm.errors import CheckpointError, EngineError, RequestError, UnsupportedError
from modulm.loading import open_checkpoint
from modulm.loading.model import build_model, model_names, plan_checkpoint
from modulm.loading.weights import fill
from modulm_weight_transfer.choice import chosen_backend
from modulm_weight_transfer.deltas import DeltaSource
from modulm_weight_transfer.finite import FiniteCheck, FiniteSource
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

    from modulm.contracts.loader import StoredTensor
    from modulm.engine.worker.worker import Worker
    from modulm.loading.weights import WeightPlan
    from modulm.nn.weight_slots import Unit
    from modulm_weight_transfer.contract import TensorSource, WeightTransferBackend

__all__ = ["WeightReceiver", "receiver_of"]

log = logging.getLogger("modulm.weights")

_RECEIVERS: WeakKeyDictionary[Worker, WeightReceiver] = WeakKeyDictionary()


def receiver_of(worker: Worker) -> WeightReceiver:
    """Return a worker's receiver. Raises RequestError if it is not connected."""
    receiver = _RECEIVERS.get(worker)
    if receiver is None:
        message = "weight transfer is not set up: call init_weight_transfer_engine first"
        raise RequestError(message, "update_info")
    return receiver


class _Arrived(WeightLoader):
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


class _BlankModel:
    """A copy of the worker's model without weights; each loaded module refills the running one.

    replaced: whether a value could not be refilled in place.
    """

    def __init__(self, worker: Worker) -> None:
        if worker.loaded is None:
            raise EngineError("the worker has released its weights: wake it up first")
        if worker.mesh.spread is not None:
            raise UnsupportedError("weights of experts that move between ranks: not supported yet")
        self.checkpoint = open_checkpoint(worker.config, worker.plugins)
        masks = any(part.masks for part in worker.parts)
        self.built = build_model(
            worker.config,
            self.checkpoint,
            worker.platform,
            worker.plugins,
            worker.mesh,
            masks=masks,
        )
        self.worker, self.units = worker, self.built.shared.units
        live = worker.loaded.units
        if not live or [unit.path for unit in live] != [unit.path for unit in self.units]:
            raise UnsupportedError(
                "the weights of this model cannot be updated, because it loads them itself"
            )
        self.loaded, self.replaced, self.changed = worker.loaded, False, False
        self._running = {id(unit): other for unit, other in zip(self.units, live, strict=True)}
        #: The units that are overwritten instead of loaded again.
        self._writers = writers_of(zip(self.units, live, strict=True))
        #: By id, units of the last plan with some of their tensors: the whole units.
        self._reduced_units: dict[int, Unit] = {}
        self._baselines: dict[int, Baseline] = {}
        #: Groups of units that are applied together, keyed by the one that the others wait for:
        #: the units, how many are not loaded yet, and the modules loaded so far.
        self._members: dict[int, list[Unit]] = {}
        self._families: dict[int, int] = {}
        self._loaded: dict[int, list[tuple[Module, Module, Unit]]] = {}
        #: Parameter -> the group of units that fills it.
        self._owners: dict[tuple[int, str], int] = {}
        self._keeps: set[tuple[int, str]] = set()
        for unit, running in zip(self.units, live, strict=True):
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
        loader: _Arrived,
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
        taken = {id(unit) for unit in units}
        taken |= {id(self._reduced_units[id(unit)]) for unit in units if id(unit) not in own}
        rest = [unit for unit in self.units if id(unit) not in taken]
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

    def fill(self, plan: WeightPlan, loader: _Arrived) -> None:
        """Overwrite or load the planned modules one by one."""
        self._keeps = {
            (id(slot.module), slot.attribute)
            for unit in plan.units
            for slot in unit.slots
            if slot.optional and not _any_complete(slot.ways, plan.routes)
        }
        writers = dict(self._writers)
        writers |= {new: writers[id(unit)] for new, unit in self._reduced_units.items()}
        loads, writes = split_plan(plan, writers)
        overwriting = OverwritingLoader(loader, writes, loader.sparse)
        try:
            fill(loads, overwriting, device=self.worker.platform.device, progress=False)
        finally:
            self.changed |= overwriting.written
        for unit in plan.units:
            whole = self._reduced_units.get(id(unit), unit)
            if id(whole) in self._writers:
                _renew_adapters(self._running[id(whole)])

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
        if not self._families[family]:
            self._refill(family)

    @torch.inference_mode()
    def _refill(self, family: int) -> None:
        """Refill the running modules of a family, and free the loaded ones."""
        self.changed = True
        loaded = self._loaded.pop(family)
        for slot in (slot for unit in self._members[family] for slot in unit.slots):
            slot._shared.clear()
        for source, target, _ in loaded:
            baseline = self._baselines[id(source)]
            for table, name, value in baseline.changes():
                if self._owners.get((id(source), name), family) != family:
                    continue
                if (id(source), name) not in self._keeps:
                    self.replaced |= not refill(target, table, name, value)
                baseline.restore(table, name)
        for running in {id(unit): unit for *_, unit in loaded}.values():
            _renew_adapters(running)
            self._families[family] += 1


def _any_complete(ways: Sequence[Sequence[Any]], routes: Mapping[str, Any]) -> bool:
    return any(all(part.name in routes for part in way) for way in ways)


def _renew_adapters(unit: Unit) -> None:
    """Update adapters that depend on the weight of the layer they wrap (DoRA)."""
    method: Any = getattr(unit.module, "method", None)
    if (around := getattr(method, "around", None)) is not None:
        layer: Any = unit.module
        table = layer.spec.kind is LinearKind.EMBEDDING
        around.finish(partial(method.base.embed if table else method.base.apply, layer))


class WeightReceiver:
    """Receives the updates of one worker."""

    def __init__(self, worker: Worker, backend: WeightTransferBackend) -> None:
        self._worker, self._backend = worker, backend
        self._sources: dict[int, TensorSource] = {}
        self._checks: dict[int, FiniteCheck] = {}
        #: By the number of `update_weights`, functions that put an adapter's tensors in place.
        self._adapters: dict[int, Callable[[], None]] = {}
        self._blank: _BlankModel | None = None
        #: The model of the last update, which the next one uses again.
        self._spare: _BlankModel | None = None
        self._partial = False
        #: The plan that `complete` has checked.
        self._checked_plan: WeightPlan | None = None
        #: Whether a tensor was stored in another dtype than the model's.
        self._converted = False

    @classmethod
    def connect(cls, worker: Worker, info: Mapping[str, Any]) -> None:
        """Create a worker's receiver and connect it to the trainer; replaces an earlier one."""
        chosen = chosen_backend(worker.config)
        if chosen is None:
            raise UnsupportedError(
                "this engine does not accept weights: start it with --weight-transfer-config "
                '\'{"backend": "..."}\''
            )
        driver, options = chosen
        cls.disconnect(worker)
        parallel, world = worker.config.parallel, worker.mesh.world
        replica = parallel.data_parallel_rank_local
        ranks = parallel.data_parallel_size * world.size
        backend = driver(options, replica * world.size + world.rank, ranks)
        backend.connect(info)
        cls.attach(worker, backend)

    @classmethod
    def attach(cls, worker: Worker, backend: WeightTransferBackend) -> None:
        """Create a worker's receiver for a connected backend."""
        _RECEIVERS[worker] = cls(worker, backend)

    @classmethod
    def disconnect(cls, worker: Worker) -> None:
        """Close a worker's receiver, if there is one."""
        receiver = _RECEIVERS.pop(worker, None)
        if receiver is not None:
            receiver.cancel()
            receiver._backend.close()

    @classmethod
    def release(cls, worker: Worker) -> None:
        """Discard an unfinished update, and all references to the worker's modules."""
        receiver = _RECEIVERS.get(worker)
        if receiver is not None:
            receiver.cancel()
            receiver._spare = None
            gc.collect()

    def start(self, partial_update: bool) -> None:
        """Begin an update; discards an unfinished one."""
        self.cancel()
        blank, self._spare = self._spare, None
        if blank is None or blank.loaded is not self._worker.loaded:
            blank = _BlankModel(self._worker)
        blank.replaced = blank.changed = self._converted = False
        self._partial, self._blank = partial_update, blank

    def cancel(self) -> None:
        """Discard an unfinished update."""
        for number in (*self._sources, *self._adapters):
            self.drop(number)
        self._blank = self._checked_plan = None

    def drop(self, number: int) -> None:
        """Discard the tensors of one `update_weights`, if it was accepted."""
        check = self._checks.pop(number, None)
        if check is not None:
            check.stop()
        self._adapters.pop(number, None)
        source = self._sources.pop(number, None)
        if source is not None:
            source.close()

    @property
    def _model(self) -> _BlankModel:
        if self._blank is None:
            raise RequestError(
                "no update is in progress: call start_weight_update first", "update_info"
            )
        return self._blank

    def check(self, number: int, info: Mapping[str, Any]) -> bool:
        """Check the tensors of `update_weights` call `number`; no weight changes.

        Returns whether it must be received now, because it is a stream. Otherwise threads check
        meanwhile that its values are finite, see `verify`.
        """
        blank, source = self._model, self._backend.open(info)
        try:
            if "adapter" in info:
                self._adapters[number] = self._replace_adapter(info["adapter"], source)
                source.close()
                return False
            if info.get("target", "model") != "model":
                raise UnsupportedError(
                    f"target: the weights of {info['target']!r} cannot be updated yet, only those "
                    "of the model and of adapters; restart the engine with other drafters"
                )
            checked = self._backend.checked(source)
            if "deltas" in info:
                source = DeltaSource(source, info["deltas"])
                if not self._partial:
                    message = "needs start_weight_update(partial=True)"
                    raise RequestError(message, "deltas")
            known = {name for earlier in self._sources.values() for name in earlier.index()}
            twice = known & set(source.index())
            if twice:
                raise RequestError(f"{min(twice)} occurs twice in one update", "update_info")
            streams = self._backend.streams
            if streams:
                self._plan(_Arrived([source]))
            else:
                blank.plan(_Arrived([*self._sources.values(), source]), _complete)
                world, stored = self._worker.mesh.world, source.read
                if isinstance(source, DeltaSource):
                    source.check()
                    stored = source.stored
                unchecked = (each for each in stored() if each[0] not in checked)
                self._checks[number] = FiniteCheck(unchecked, world.rank, world.size)
        except CheckpointError as error:
            source.close()
            raise RequestError(str(error), "update_info") from error
        except BaseException:
            source.close()
            raise
        self._sources[number] = source
        dtype = blank.built.dtype
        self._converted |= any(stored.dtype != dtype for stored in source.index().values())
        return streams

    def _replace_adapter(self, name: object, source: TensorSource) -> Callable[[], None]:
        """Return a function that puts an adapter's tensors in place. Raises RequestError."""
        loaded = self._worker.loaded
        bank = None if loaded is None else loaded.adapters
        if bank is None:
            raise RequestError("the engine runs without adapters", "adapter")
        if not isinstance(name, str):
            raise RequestError("must be the name of a loaded adapter", "adapter")
        tensors = {stored: tensor.clone() for stored, tensor in FiniteSource(source).read()}
        try:
            return bank.replace(name, tensors)
        except CheckpointError as error:
            raise RequestError(str(error), "adapter") from error

    def _plan(self, loader: _Arrived) -> WeightPlan:
        """Plan the update. Raises CheckpointError and RequestError."""
        wanted = _touched if self._partial else None
        plan = self._model.plan(loader, wanted, in_parts=self._partial)
        self._model.refuse_sparse(plan, loader.sparse)
        return plan

    def verify(self, number: int, wait: bool) -> bool:
        """Return whether the values of an `update_weights` have been checked.

        Raises RequestError naming a tensor with a value that is not finite.
        """
        check = self._checks.get(number)
        if check is None:
            return True
        if not check.done(wait):
            return False
        del self._checks[number]
        return True

    def receive(self) -> None:
        """Apply tensors as they arrive from a stream."""
        _, source = self._sources.popitem()
        deltas = isinstance(source, DeltaSource)  # which check their values themselves
        loader, blank = _Arrived([source if deltas else FiniteSource(source)]), self._model
        plan = self._plan(loader)
        try:
            blank.fill(plan, loader)
        finally:
            source.close()

    def changed(self) -> bool:
        """Return whether the last update has changed weights."""
        blank = self._blank or self._spare
        return blank is not None and blank.changed

    def complete(self) -> bool:
        """Check for missing tensors; returns whether there is an update. Raises RequestError."""
        if self._backend.streams:
            return self._model.changed or bool(self._adapters)
        loader = _Arrived(list(self._sources.values()))
        if self._adapters and not self._sources:
            return True
        if not self._sources:
            raise RequestError("no weights were received: call update_weights first", "update_info")
        try:
            self._checked_plan = self._plan(loader)
        except CheckpointError as error:
            raise RequestError(str(error), "update_info") from error
        return True

    def finish(self) -> None:
        """Apply the update.

        If a dtype was converted, which can overflow, checks that logits are still finite. That
        costs as much as generating a token; otherwise finite values are enough.
        """
        blank, loader = self._model, _Arrived(list(self._sources.values()))
        if self._sources:
            blank.fill(self._checked_plan or self._plan(loader), loader)
        for replace in self._adapters.values():
            replace()
        self.cancel()
        self._spare = blank
        runner = self._worker._runner
        if runner is None:
            return  # the worker sleeps; it records and checks when it wakes up
        if blank.replaced:
            runner.forget_recordings()
            runner.record()
        if self._converted:
            runner.check()
        if blank.loaded.adapters is not None:
            blank.loaded.adapters.renew()


def _touched(unit: Unit, names: set[str]) -> bool:
    """Whether an update has something of a module."""
    return any(part.name in names for slot in unit.slots for way in slot.ways for part in way)


def _complete(unit: Unit, names: set[str]) -> bool:
    """Whether an update has all of a module."""
    return all(
        any(all(part.name in names for part in way) for way in slot.ways)
        for slot in unit.slots
        if not slot.optional
    )
