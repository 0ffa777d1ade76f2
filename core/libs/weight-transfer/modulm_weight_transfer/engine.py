"""An engine's half of weight updates: their order, what becomes of caches, and the version."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from attrs import asdict, evolve, frozen

from modulm.errors import EngineError, EngineStalled, ModulmError, RequestError, UnsupportedError
from modulm_weight_transfer import functions
from modulm_weight_transfer.pause import hold, release

if TYPE_CHECKING:
    from modulm.engine.core.engine_core import EngineCore

__all__ = ["OPERATIONS", "PAUSES", "EngineWeights", "WeightState"]

log = logging.getLogger("modulm.weights")


@frozen
class WeightState:
    """What an engine says of its weights.

    weight_version: how often they were updated, or what `update_weight_version` has set.
    updating: whether an update is open. broken: why they cannot be used, None if they can.
    paused: the mode of a pause (one of `PAUSES`), None while requests are run. asleep: the level of
    sleep, None if the engine is awake. busy: whether requests were in the engine when it was asked.
    """

    weight_version: int = 0
    updating: bool = False
    broken: str | None = None
    paused: str | None = None
    asleep: int | None = None
    busy: bool = False


class EngineWeights:
    """Weight updates of one engine. All methods run between two steps.

    changed: told of each new state.
    """

    def __init__(
        self, core: EngineCore, changed: Callable[[WeightState], None] = lambda state: None
    ) -> None:
        self._core, self._changed = core, changed
        self.state = WeightState()
        self._began, self._number, self._released = 0.0, 0, False

    def run(self, operation: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Run one of `OPERATIONS` by its name; returns the new state."""
        if operation not in OPERATIONS:
            raise RequestError(f"{operation!r} is no operation on weights", "operation")
        getattr(self, operation)(**arguments)
        return asdict(evolve(self.state, busy=self._core.loop.busy))

    def info(self) -> None:
        """Do nothing: the state is the answer."""

    def init(self, init_info: Mapping[str, Any]) -> None:
        """Have every worker meet the trainer."""
        if self._core.config.parallel.shared_experts:
            raise UnsupportedError("weight updates with experts shared by replicas: not yet")
        self._call(functions.connect, dict(init_info))
        self._set(updating=False)

    def shutdown(self) -> None:
        """Have every worker leave the trainer."""
        self._call(functions.disconnect)
        self._set(updating=False)

    def start(self, is_checkpoint_format: bool = True, partial: bool = False) -> None:
        """Begin an update. partial: tensors that do not come stay as they are."""
        if not is_checkpoint_format:
            raise UnsupportedError(
                "is_checkpoint_format: only tensors as in the checkpoint are taken; they are "
                "fused, cut and quantized here"
            )
        self._call(functions.start, partial)
        self._began = time.perf_counter()
        self._set(updating=True)

    def update(self, update_info: Mapping[str, Any]) -> None:
        """Check tensors, and put them in place if they come as a stream."""
        if not self.state.updating:
            raise RequestError("no update is open: call start_weight_update first", "update_info")
        self._number += 1
        try:
            streams = any(self._call(functions.check, self._number, dict(update_info)))
        except ModulmError:
            self._call(functions.drop, self._number)
            raise
        if streams:
            self._change(functions.receive)

    def finish(self, weight_version: int | None = None) -> None:
        """Put everything in place. The version rises, or becomes `weight_version`, and cached
        prefixes are forgotten.
        """
        if not self.state.updating:
            raise RequestError("no update is open: call start_weight_update first")
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
        """Drop an open update."""
        self._call(functions.cancel)
        self._set(updating=False)

    def release(self, level: int) -> None:
        """The engine was put to sleep. Level 2 gives up weights, and what came of an update."""
        self._released |= level > 1
        self._set(updating=self.state.updating and level < 2, asleep=level)

    def doze(self) -> None:
        """Sleep at level 0: nothing is scheduled, and all memory is kept."""
        hold(self._core)
        self._set(asleep=0)

    def reload(self) -> None:
        """The engine is awake again; weights that were released are the checkpoint's."""
        if self._released and (self.state.weight_version or self.state.broken):
            log.info("the weights are the checkpoint's again")
            self._core.reset_prefix_cache(b"")
            self._set(weight_version=self.state.weight_version + 1, broken=None)
        self._released = False
        if self.state.paused != "keep":
            release(self._core)
        self._set(asleep=None)

    def set_version(self, weight_version: int) -> None:
        """Give the weights another number."""
        if type(weight_version) is not int or weight_version < 0:
            raise RequestError("must be a whole number, 0 or more", "weight_version")
        self._set(weight_version=weight_version)

    def pause(self, mode: str) -> None:
        """Front ends keep new requests back. abort: those that run are ended, wait: they go on,
        keep: they stand still.
        """
        if mode not in PAUSES:
            raise RequestError(f"must be one of {', '.join(PAUSES)}", "mode")
        if mode == "keep":
            hold(self._core)
        elif self.state.asleep != 0:
            release(self._core)
        self._set(paused=mode)

    def resume(self) -> None:
        """End a pause."""
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
        """Call what changes weights. If it fails, they are no longer whole."""
        try:
            self._call(function)
        except ModulmError as error:
            reason = (
                f"an update of the weights failed half way ({error}): send a complete update, or "
                "restart the engine"
            )
            log.error("%s", reason)
            self._core.reset_prefix_cache(uuid4().bytes)
            self._set(updating=False, broken=reason)
            raise EngineError(reason) from error

    def _set(self, **values: Any) -> None:
        self.state = WeightState(**{**asdict(self.state), **values})
        self._changed(self.state)


#: What front ends may ask for, by their methods here.
OPERATIONS = (
    "info", "init", "shutdown", "start", "update", "finish", "cancel", "set_version", "pause",
    "resume", "doze",
)  # fmt: skip
#: What becomes of running requests when an engine is paused.
PAUSES = ("abort", "wait", "keep")
