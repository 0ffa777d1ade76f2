"""The worker's half of weight updates: tensors are checked, repacked and copied into the model, or
into that of its drafter.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from modulm.errors import CheckpointError, RequestError, UnsupportedError
from modulm_speculation.draft_model import DraftModel, ReplaceableDraft, draft_of
from modulm_weight_transfer.blank import Arrived, BlankModel, blank_draft, blank_model
from modulm_weight_transfer.choice import chosen_backend
from modulm_weight_transfer.deltas import DeltaSource
from modulm_weight_transfer.finite import FiniteCheck, FiniteSource
from modulm_weight_transfer.preparation import Preparation

if TYPE_CHECKING:
    from collections.abc import Callable

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


class WeightReceiver:
    """Receives the updates of one worker."""

    def __init__(self, worker: Worker, backend: WeightTransferBackend) -> None:
        self._worker, self._backend = worker, backend
        self._sources: dict[int, TensorSource] = {}
        #: The numbers of `update_weights` whose tensors are the drafter's.
        self._drafted: set[int] = set()
        self._checks: dict[int, FiniteCheck] = {}
        #: What `verify` does after the check of values, if the layers need it.
        self._preparations: dict[int, Preparation] = {}
        #: By the number of `update_weights`, functions that put an adapter's tensors in place.
        self._adapters: dict[int, Callable[[], None]] = {}
        self._blank: BlankModel | None = None
        #: The model of the last update, which the next one uses again.
        self._spare: BlankModel | None = None
        #: The model of the drafter, kept for later updates.
        self._draft: BlankModel | None = None
        self._partial = False
        #: Plans of `check` for whole models, by the number of their `update_weights`, so that steps
        #: do not stand still for them.
        self._whole: dict[int, tuple[BlankModel, WeightPlan, Arrived]] = {}
        #: The plans that `complete` has checked, with their models and tensors.
        self._plans: list[tuple[BlankModel, WeightPlan, Arrived]] = []
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
            receiver._spare = receiver._draft = None
            gc.collect()

    def start(self, partial_update: bool) -> None:
        """Begin an update; discards an unfinished one."""
        self.cancel()
        blank, self._spare = self._spare, None
        if blank is None or blank.loaded is not self._worker.loaded:
            blank = blank_model(self._worker)
        for each in filter(None, (blank, self._draft)):
            each.replaced = each.changed = False
            each.forget_prepared()
        self._converted = False
        self._partial, self._blank = partial_update, blank

    def cancel(self) -> None:
        """Discard an unfinished update."""
        for number in (*self._sources, *self._adapters):
            self.drop(number)
        self._blank = None
        self._plans.clear()

    def drop(self, number: int) -> None:
        """Discard the tensors of one `update_weights`, if it was accepted."""
        check = self._checks.pop(number, None)
        if check is not None:
            check.stop()
        preparation = self._preparations.pop(number, None)
        if preparation is not None:
            preparation.stop()
        if number in self._sources:  # others are loaded again as well, in `finish`
            for model in filter(None, (self._blank, self._draft)):
                model.forget_prepared()
        self._adapters.pop(number, None)
        self._whole.pop(number, None)
        self._drafted.discard(number)
        source = self._sources.pop(number, None)
        if source is not None:
            source.close()

    def _model(self, drafted: bool = False) -> BlankModel:
        """Return the model of an update, or that of its drafter. Raises RequestError."""
        if self._blank is None:
            raise RequestError(
                "no update is in progress: call start_weight_update first", "update_info"
            )
        if not drafted:
            return self._blank
        draft = draft_of(self._blank.loaded)
        if not isinstance(draft, DraftModel):
            raise RequestError("the engine has no drafter with weights", "target")
        if self._draft is None or self._draft.loaded is not draft.loaded:
            self._draft = blank_draft(self._worker, draft)
        return self._draft

    def _sent(self, drafted: bool) -> list[TensorSource]:
        """The tensors received so far for the model, or for its drafter."""
        return [self._sources[number] for number in self._numbers(drafted)]

    def _numbers(self, drafted: bool) -> list[int]:
        """The numbers of the `update_weights` so far for the model, or for its drafter."""
        return [number for number in self._sources if (number in self._drafted) == drafted]

    def check(self, number: int, info: Mapping[str, Any]) -> bool:
        """Check the tensors of `update_weights` call `number`; no weight changes.

        Returns whether it must be received now, because it is a stream. Otherwise threads check
        meanwhile that its values are finite, see `verify`.
        """
        self._model()
        target = info.get("target", "model")
        if target not in ("model", "draft"):
            raise RequestError(f"must be model or draft, not {target!r}", "target")
        drafted, source = target == "draft", self._backend.open(info)
        try:
            if "adapter" in info:
                self._adapters[number] = self._replace_adapter(info["adapter"], source)
                source.close()
                return False
            if drafted and (replace := self._replace_draft(source)) is not None:
                self._adapters[number] = replace
                source.close()
                return False
            blank = self._model(drafted)
            checked = self._backend.checked(source)
            if "deltas" in info:
                source = DeltaSource(source, info["deltas"])
                if not self._partial:
                    message = "needs start_weight_update(partial=True)"
                    raise RequestError(message, "deltas")
            known = {name for earlier in self._sent(drafted) for name in earlier.index()}
            twice = known & set(source.index())
            if twice:
                raise RequestError(f"{min(twice)} occurs twice in one update", "update_info")
            streams = self._backend.streams
            if streams:
                self._plan(Arrived([source]), blank)
            else:
                loader = Arrived([*self._sent(drafted), source])
                plan = blank.plan(loader, _complete)
                if len(plan.units) == len(blank.units) and not self._partial:
                    self._whole[number] = blank, plan, loader
                preparation = Preparation.of(blank, plan, loader, self._worker.platform)
                if preparation is not None and "deltas" not in info:
                    self._preparations[number] = preparation
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
            self._whole.pop(number, None)
            self._preparations.pop(number, None)
            source.close()
            raise
        self._sources[number] = source
        if drafted:
            self._drafted.add(number)
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

    def _replace_draft(self, source: TensorSource) -> Callable[[], None] | None:
        """Return a function that puts the tensors of a drafter in place that keeps them itself;
        None for a drafter with a model. Raises RequestError.
        """
        if not self._worker.mesh.gives:  # another rank drafts
            for _ in source.read() if self._backend.streams else ():
                pass
            return _nothing
        draft = draft_of(self._model().loaded)
        if not isinstance(draft, ReplaceableDraft):
            return None
        tensors = {stored: tensor.clone() for stored, tensor in FiniteSource(source).read()}
        try:
            return draft.replace(tensors)
        except (ValueError, KeyError) as error:
            raise RequestError(str(error), "update_info") from error

    def _plan(self, loader: Arrived, model: BlankModel) -> WeightPlan:
        """Plan the update of a model. Raises CheckpointError and RequestError."""
        wanted = _touched if self._partial else None
        plan = model.plan(loader, wanted, in_parts=self._partial)
        model.refuse_sparse(plan, loader.sparse)
        return plan

    def verify(self, number: int, wait: bool) -> bool:
        """Return whether the values of an `update_weights` have been checked, and layers that are
        quantized or rearranged have been loaded.

        Raises RequestError naming a tensor with a value that is not finite.
        """
        for tasks in (self._checks, self._preparations):
            task = tasks.get(number)
            if task is None:
                continue
            if not task.done(wait):
                return False
            del tasks[number]
        return True

    def receive(self) -> None:
        """Apply tensors as they arrive from a stream."""
        number, source = self._sources.popitem()
        deltas = isinstance(source, DeltaSource)  # which check their values themselves
        loader, blank = (
            Arrived([source if deltas else FiniteSource(source)]),
            self._model(number in self._drafted),
        )
        plan = self._plan(loader, blank)
        try:
            blank.fill(plan, loader)
        finally:
            source.close()

    def changed(self) -> bool:
        """Return whether the last update has changed weights."""
        return any(each.changed for each in (self._blank or self._spare, self._draft) if each)

    def complete(self) -> bool:
        """Check for missing tensors; returns whether there is an update. Raises RequestError."""
        if self._backend.streams:
            return self.changed() or bool(self._adapters)
        if not self._sources and not self._adapters:
            raise RequestError("no weights were received: call update_weights first", "update_info")
        self._plans.clear()
        try:
            for drafted in (False, True):
                if sources := self._sent(drafted):
                    loader, model = Arrived(sources), self._model(drafted)
                    whole = self._whole.get(max(self._numbers(drafted)))
                    if whole is None or whole[2].sources != sources:
                        whole = model, self._plan(loader, model), loader
                    self._plans.append(whole)
        except CheckpointError as error:
            raise RequestError(str(error), "update_info") from error
        return True

    def finish(self) -> None:
        """Apply the update.

        If a dtype was converted, which can overflow, checks that logits are still finite. That
        costs as much as generating a token; otherwise finite values are enough.
        """
        blank = self._model()
        for model, plan, loader in self._plans:
            model.fill(plan, loader)
        for replace in self._adapters.values():
            replace()
        self.cancel()
        self._spare = blank
        runner = self._worker._runner
        if runner is None:
            return  # the worker sleeps; it records and checks when it wakes up
        draft = draft_of(blank.loaded)
        if self._draft is not None and self._draft.replaced and isinstance(draft, DraftModel):
            draft.record()
        if blank.replaced:
            runner.forget_recordings()
            runner.record()
        if self._converted:
            runner.check()
        if blank.loaded.adapters is not None:
            blank.loaded.adapters.renew()


def _nothing() -> None:
    """Put nothing in place."""


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
