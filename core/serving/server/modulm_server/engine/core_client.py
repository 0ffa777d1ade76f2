"""Clients through which front ends reach an engine core; here that of an engine in a thread.

`process_client.py` has the client of an engine core in another process.
"""

from __future__ import annotations

import faulthandler
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import frozen

from modulm.contracts.engine_info import EngineInfo
from modulm.contracts.requests import Request, StepEvents
from modulm.errors import EngineDead, EngineError, UnsupportedError
from modulm_frontend.defaults import sampling_defaults
from modulm_frontend.profile import StepProfile
from modulm_server.engine.adapters import Adapter, AdapterRegistry
from modulm_server.engine.client import ReplicaHealth
from modulm_server.engine.heartbeat import StepWatch, stacks_file
from modulm_tokenizers.tokenizer import open_tokenizer
from modulm_weight_transfer.engine import EngineWeights, WeightState

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.tokenizer import Tokenizer
    from modulm.engine.core.engine_core import EngineCore
    from modulm.plugins.manager import PluginManager
    from modulm_server.engine.early_tokenizer import EarlyTokenizer

__all__ = [
    "EngineCoreClient",
    "ReplicaEvents",
    "ReplicaLost",
    "ReplicaReady",
    "ThreadCoreClient",
    "WorkerCall",
    "sleep",
    "wake_up",
]

#: Seconds between two checks whether the thread has ended.
_GRACE = 0.5


@frozen
class ReplicaEvents:
    """A step's events of the replica at this index."""

    replica: int
    events: StepEvents


@frozen
class ReplicaLost:
    """Sequences that the replica at this index no longer runs."""

    replica: int
    sequences: tuple[str, ...]
    error: EngineError


@frozen
class ReplicaReady:
    """The replica at this index takes requests again."""

    replica: int


@frozen
class WorkerCall:
    """A call into workers; see `Executor.call`."""

    function: str | Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})
    timeout: float | None = None


def sleep(registry: AdapterRegistry, weights: EngineWeights, level: int) -> None:
    """Put an engine with its adapters to sleep; call between two steps."""
    registry.sleep(level)
    weights.release(level)


def wake_up(core: EngineCore, weights: EngineWeights) -> None:
    """Wake an engine up; call between two steps."""
    weights.restore()
    core.wake_up()
    weights.reload()


class EngineCoreClient(ABC):
    """A connection to one engine core. Reports its step events and its end, on any thread."""

    info: EngineInfo
    #: The adapters that requests may name, by name.
    adapters: Mapping[str, Adapter] = MappingProxyType({})
    #: Where further front ends of the same engine connect; None if they cannot.
    address: str | None = None
    #: The ranks of the replicas by index, if dead engines are restarted.
    ranks: Sequence[int] = ()
    #: The index of this front end among the engine's.
    number: int = 0
    #: The engine's weight state, and the function to call, on any thread, when it changes.
    weights: WeightState = WeightState()
    weights_changed: Callable[[], None] = staticmethod(lambda: None)
    #: The tokenizer, if it was opened while the model was loaded.
    early: EarlyTokenizer | None = None
    #: This front end's report (its metrics) for another one. Called on any thread.
    report: Callable[[], str] = staticmethod(lambda: "")

    #: The replicas that it reaches, if there are several; `client` is None while one is down.
    _replicas: Sequence[Any] = ()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """See `EngineClient.process_ids`."""
        clients = [replica.client for replica in self._replicas if replica.client is not None]
        return tuple(number for client in clients for number in client.process_ids)

    @property
    def replicas(self) -> Sequence[ReplicaHealth]:
        """The state of each replica, if dead engines are restarted."""
        return ()

    def rolling_restart(self) -> None:
        """Restart the replicas that this front end started one after another, in the background.

        Raises UnsupportedError if there are not several.
        """
        raise UnsupportedError("a rolling restart needs replicas (--data-parallel-size)")

    @property
    def down(self) -> EngineError | None:
        """Why no request can be run now; None if requests can be run."""
        return None

    def replica_index(self, sequences: Sequence[str]) -> int:
        """The index of the replica that runs one of these sequences; 0 if none does."""
        return 0

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Submit requests, all or none. Raises QueueFull or EngineDead."""

    @abstractmethod
    def abort(self, request: str) -> None:
        """End a request; unknown ones are ignored."""

    def refresh_adapters(self) -> Future[None]:
        """Update `adapters`; done when it holds everything that was loaded before the call."""
        answer: Future[None] = Future()
        answer.set_result(None)
        return answer

    @abstractmethod
    def load_adapter(self, adapter: Adapter, replace: bool) -> Future[None]:
        """See `AdapterRegistry.load`; `adapters` holds it once the future is done."""

    @abstractmethod
    def unload_adapter(self, name: str) -> Future[None]:
        """See `AdapterRegistry.unload`."""

    @abstractmethod
    def reset_prefix_cache(self) -> Future[None]:
        """Clear the prefix cache, between two steps."""

    @abstractmethod
    def sleep(self, level: int) -> Future[None]:
        """See `EngineCore.sleep`; between two steps."""

    @abstractmethod
    def wake_up(self) -> Future[None]:
        """See `EngineCore.wake_up`; between two steps."""

    @abstractmethod
    def is_sleeping(self) -> Future[bool]:
        """Whether the engine is asleep."""

    @abstractmethod
    def start_profile(self) -> Future[None]:
        """See `StepProfile.start`; between two steps."""

    @abstractmethod
    def stop_profile(self) -> Future[None]:
        """See `StepProfile.stop`; between two steps."""

    @abstractmethod
    def call_workers(self, call: WorkerCall) -> Future[list[Any]]:
        """See `Executor.call`; between two steps. Raises RequestError if it cannot be sent."""

    @abstractmethod
    def run_weights(self, operation: str, arguments: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """See `EngineWeights.run`; between two steps."""

    def reports(self) -> Future[list[str]]:
        """The reports of the engine's other front ends, gone ones included."""
        answer: Future[list[str]] = Future()
        answer.set_result([])
        return answer

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, for this front end; the engine is stopped if it is unreadable."""
        if self.early is not None and self.early.fits(self.info):
            return self.early.tokenizer
        try:
            return open_tokenizer(self.info.config, self.info.path)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def trouble(self) -> str | None:
        """Why the engine counts as stalled, or None."""

    @abstractmethod
    def dump_stacks(self) -> None:
        """Write the stacks of the engine's threads to its log."""

    def forget_silence(self) -> None:
        """Count the engine's silence from now on, because this process was suspended itself."""

    def give_up(self, error: EngineError) -> None:
        """Fail all calls that wait for an answer."""

    def kill(self) -> bool:
        """Kill the engine; False if another process owns it."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Stop the engine, or disconnect if another process owns it. May be called twice."""


class ThreadCoreClient(EngineCoreClient):
    """An engine in a thread of this process."""

    def __init__(
        self,
        config: EngineConfig,
        plugins: PluginManager,
        events: Callable[[StepEvents], None],
        died: Callable[[EngineDead], None],
    ) -> None:
        self._tell = events
        self.died = died
        ready: Future[EngineCore] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(config, plugins, ready), name="modulm-engine", daemon=True
        )
        self._thread.start()
        self.core = ready.result()
        self.info = self.core.info
        self._registry = AdapterRegistry(self.core, events, self._adapters_changed)
        self._watch = StepWatch.of(self.core)
        self._profile = StepProfile(self.core)
        self._weights = EngineWeights(self.core, self._weights_news)

    def _run(self, config: EngineConfig, plugins: PluginManager, ready: Future[EngineCore]) -> None:
        from modulm.engine.core.engine_core import EngineCore

        try:
            core = EngineCore(config, plugins, self, "server", sampling_defaults)
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(core)
        core.loop.run()
        core.stop()

    def events(self, events: StepEvents) -> None:
        """Handle a finished step (see `loop.Listener`)."""
        if events.finished:
            self._registry.release(events.finished)
        self._tell(events)

    def _adapters_changed(self, adapters: Sequence[Adapter]) -> None:
        self.adapters = {adapter.name: adapter for adapter in adapters}

    def _weights_news(self, state: WeightState) -> None:
        self.weights = state
        self.weights_changed()

    def submit(self, requests: Sequence[Request]) -> None:
        self._registry.submit(requests)

    def abort(self, request: str) -> None:
        self._registry.forget(request)
        self.core.loop.abort(request)

    def load_adapter(self, adapter: Adapter, replace: bool) -> Future[None]:
        return self._registry.load(adapter, replace)

    def unload_adapter(self, name: str) -> Future[None]:
        return self._registry.unload(name)

    def reset_prefix_cache(self) -> Future[None]:
        return self.core.loop.call(self.core.reset_prefix_cache)

    def sleep(self, level: int) -> Future[None]:
        return self.core.loop.call(partial(sleep, self._registry, self._weights, level))

    def wake_up(self) -> Future[None]:
        return self.core.loop.call(partial(wake_up, self.core, self._weights))

    def is_sleeping(self) -> Future[bool]:
        return self.core.loop.call(self.core.is_sleeping)

    def start_profile(self) -> Future[None]:
        return self.core.loop.call(self._profile.start)

    def stop_profile(self) -> Future[None]:
        return self.core.loop.call(self._profile.stop)

    def call_workers(self, call: WorkerCall) -> Future[list[Any]]:
        execute = self.core.executor.call
        return self.core.loop.call(
            partial(execute, call.function, call.args, call.kwargs, call.timeout)
        )

    def run_weights(self, operation: str, arguments: Mapping[str, Any]) -> Future[dict[str, Any]]:
        return self.core.loop.call(partial(self._weights.run, operation, arguments))

    def trouble(self) -> str | None:
        return self._watch.look()

    def dump_stacks(self) -> None:
        with suppress(OSError):  # standard error may be no file
            faulthandler.dump_traceback(stacks_file(self.info.config), all_threads=True)

    def kill(self) -> bool:
        return True  # it ends with the process

    def close(self) -> None:
        """Stop the engine. A thread in a step that never ends is left behind."""
        self._registry.close()
        self.core.loop.stop()
        self._thread.join(_GRACE)
        while self._thread.is_alive() and self._watch.look() is None:
            self._thread.join(_GRACE)
