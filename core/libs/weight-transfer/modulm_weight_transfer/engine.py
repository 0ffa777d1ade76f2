"""The engine's half of weight updates: their order, cache invalidation, and the weight version."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from attrs import asdict, evolve, frozen

from modulm.errors import EngineError, EngineStalled, ModulmError, RequestError, UnsupportedError
from modulm_weight_transfer import functions
from modulm_weight_transfer.pause import hold, release

if TYPE_CHECKING:
    from modulm.engine.core.engine_core import EngineCore

__all__ = ["OPERATIONS", "PAUSES", "TAGS", "EngineWeights", "WeightState", "wakes_weights_alone"]

log = logging.getLogger("modulm.weights")


@frozen
class WeightState:
    """The state of an engine's weights.

    weight_version: number of updates, or the value set with `update_weight_version`. updating:
    whether an update is open. broken: why the weights cannot be used, None if they can. paused: the
    pause mode (one of `PAUSES`), None while requests run. asleep: the sleep level, None if the
    engine is awake. busy: whether the engine had requests when it was asked.
    """

    weight_version: int = 0
    updating: bool = False
    broken: str | None = None
    paused: str | None = None
    asleep: int | None = None
    busy: bool = False


class EngineWeights:
    """Weight updates of one engine. All methods run between two steps.

    changed: called with each new state.
    """

    def __init__(
        self, core: EngineCore, changed: Callable[[WeightState], None] = lambda state: None
    ) -> None:
        self._core, self._changed = core, changed
        self.state = WeightState()
        self._began, self._number, self._released = 0.0, 0, False
        #: The number of the update whose values are being checked, if any.
        self._checking: int | None = None

    def run(self, operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run one of `OPERATIONS` by name; returns the new state, and whether values are still
        being checked (`checking`).
        """
        if operation not in OPERATIONS:
            raise RequestError(f"{operation!r} is not an operation on weights", "operation")
        getattr(self, operation)(**arguments)
        state = asdict(evolve(self.state, busy=self._core.loop.busy))
        return {**state, "checking": self._checking is not None}

    def info(self) -> None:
        """Do nothing: `run` returns the state."""

    def init(self, init_info: Mapping[str, Any]) -> None:
        """Connect every worker to the trainer."""
        if self._core.config.parallel.shared_experts:
            raise UnsupportedError(
                "weight updates with experts shared by replicas: not supported yet"
            )
        self._call(functions.connect, dict(init_info))
        self._set(updating=False)

    def shutdown(self) -> None:
        """Disconnect every worker from the trainer."""
        self._call(functions.disconnect)
        self._set(updating=False)

    def start(self, is_checkpoint_format: bool = True, partial: bool = False) -> None:
        """Begin an update. partial: tensors that are not sent keep their values."""
        if not is_checkpoint_format:
            raise UnsupportedError(
                "is_checkpoint_format: tensors must have the checkpoint's format; the engine "
                "fuses, splits and quantizes them"
            )
        self._checking = None
        self._call(functions.start, partial)
        self._began = time.perf_counter()
        self._set(updating=True)

    def update(self, update_info: Mapping[str, Any], wait: bool = True) -> None:
        """Check tensors; apply them at once if the backend streams.

        wait: until all values have been checked. Otherwise call `verify`.
        """
        if not self.state.updating:
            raise RequestError(
                "no update is in progress: call start_weight_update first", "update_info"
            )
        self.verify()
        self._number += 1
        try:
            streams = any(self._call(functions.check, self._number, dict(update_info)))
        except ModulmError:
            self._call(functions.drop, self._number)
            raise
        if streams:
            self._change(functions.receive)
        else:
            self._checking = self._number
            self.verify(wait)

    def verify(self, wait: bool = True) -> None:
        """Check whether the values of an update are finite; without `wait` only those that were
        checked by now. Raises RequestError, and discards the tensors.
        """
        number = self._checking
        if number is None:
            return
        try:
            done = all(self._call(functions.verify, number, wait))
        except ModulmError:
            self._checking = None
            self._call(functions.drop, number)
            raise
        if done:
            self._checking = None

    def finish(self, weight_version: int | None = None) -> None:
        """Apply the update and empty the prefix cache.

        The version rises by one, or to `weight_version` if that is higher.
        """
        if not self.state.updating:
            raise RequestError("no update is in progress: call start_weight_update first")
        self.verify()
        if any(self._call(functions.complete)):
            self._change(functions.finish)
            self._core.reset_prefix_cache(uuid4().bytes)
            raised = self.state.weight_version + 1
            self._set(weight_version=max(raised, weight_version or 0), broken=None)
        else:
            self._call(functions.cancel)
        self._set(updating=False)
        seconds = time.perf_counter() - self._began
        log.info("weight version %d, updated in %.2f s", self.state.weight_version, seconds)

    def cancel(self) -> None:
        """Discard an open update."""
        self._checking = None
        self._call(functions.cancel)
        self._set(updating=False)

    def release(self, level: int) -> None:
        """Called when the engine goes to sleep. Level 1 moves weights to host memory, level 2
        discards them, and an open update.
        """
        self._released |= level > 1
        if level == 1:
            self._call(functions.suspend)
        if level > 1:
            self._checking = None
            self._call(functions.release)
        self._set(updating=self.state.updating and level < 2, asleep=level)

    def doze(self) -> None:
        """Sleep at level 0: nothing is scheduled, all memory is kept."""
        hold(self._core)
        self._set(asleep=0)

    def release_caches(self) -> None:
        """Release the KV cache of an engine that sleeps at level 0; its weights stay.

        Raises RequestError, or UnsupportedError without --enable-sleep-mode.
        """
        if self.state.asleep != 0:
            raise RequestError("the engine is not paused: put it to sleep at level 0 first")
        self._core.sleep(1)

    def restore(self) -> None:
        """Bring the weights back while the engine sleeps, so that they can be updated; its caches
        stay released. Weights that were discarded are the checkpoint's.
        """
        if self.state.asleep:
            self._call(functions.restore)
            self._count_discarded()
            self._set(asleep=1)

    def _count_discarded(self) -> None:
        """Raise the version if the checkpoint's weights have taken the place of others."""
        if self._released and (self.state.weight_version or self.state.broken):
            log.info("restored the checkpoint's weights")
            self._core.reset_prefix_cache(b"")
            self._set(weight_version=self.state.weight_version + 1, broken=None)
        self._released = False

    def reload(self) -> None:
        """Called when the engine wakes up. Discarded weights are the checkpoint's again."""
        self._count_discarded()
        if self.state.paused != "keep":
            release(self._core)
        self._set(asleep=None)

    def set_version(self, weight_version: int) -> None:
        """Set the version of the weights."""
        if type(weight_version) is not int or weight_version < 0:
            raise RequestError("must be a whole number, 0 or more", "weight_version")
        self._set(weight_version=weight_version)

    def pause(self, mode: str) -> None:
        """Make front ends hold new requests back. mode: running requests are aborted ("abort"),
        continue ("wait"), or are suspended ("keep").
        """
        if mode not in PAUSES:
            raise RequestError(f"must be one of {', '.join(PAUSES)}", "mode")
        if mode == "keep":
            hold(self._core)
        elif self.state.asleep != 0:
            release(self._core)
        self._set(paused=mode)

    def resume(self) -> None:
        """End the pause."""
        if self.state.asleep != 0:
            release(self._core)
        self._set(paused=None)

    def check(self) -> None:
        """Raise EngineStalled if the weights cannot be used."""
        if self.state.broken is not None:
            raise EngineStalled(self.state.broken)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [functions.value_of(each) for each in self._core.executor.call(function, arguments)]

    def _change(self, function: Callable[..., Any]) -> None:
        """Call a function that changes weights. If it fails after the first change, the weights are
        marked as broken.
        """
        try:
            self._call(function)
        except ModulmError as error:
            if self.state.broken is None and not self._has_changed():
                self.cancel()
                message = f"the update failed, the old weights remain in use: {error}"
                raise EngineError(message) from error
            reason = (
                f"an update of the weights failed half way ({error}): send a complete update, or "
                "restart the engine"
            )
            log.error("%s", reason)
            self._core.reset_prefix_cache(uuid4().bytes)
            self._set(updating=False, broken=reason)
            raise EngineError(reason) from error

    def _has_changed(self) -> bool:
        """Return whether a worker has changed weights since the update began."""
        try:
            return any(self._call(functions.changed))
        except ModulmError:
            return True

    def _set(self, **values: Any) -> None:
        self.state = WeightState(**{**asdict(self.state), **values})
        self._changed(self.state)


#: Operations that front ends may request, by method name.
OPERATIONS = (
    "info", "init", "shutdown", "start", "update", "verify", "finish", "cancel", "set_version",
    "pause", "resume", "doze", "restore", "release_caches",
)  # fmt: skip
#: What can wake up on its own, by vLLM's names.
TAGS = ("weights", "kv_cache", "scheduling")
#: Pause modes: what happens to running requests.
PAUSES = ("abort", "wait", "keep")


def wakes_weights_alone(tags: Sequence[str] | None, asleep: int | None) -> bool:
    """Whether `wake_up` brings only the weights back. asleep: the sleep level.

    Raises RequestError for unknown tags, and for caches before weights that were discarded.
    """
    if tags is None:
        return False
    unknown = [tag for tag in tags if tag not in TAGS]
    if unknown or not tags:
        raise RequestError(f"must be some of {', '.join(TAGS)}", "tags")
    if asleep == 2 and "weights" not in tags:
        raise RequestError("wake up weights before kv_cache: level 2 has discarded both", "tags")
    return bool(asleep) and "kv_cache" not in tags
