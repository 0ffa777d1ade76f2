"""Calls that go to all replicas of a front end."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from modulm.errors import EngineDead, EngineStalled
from modulm_fleet.router import Router
from modulm_server.engine.client import EngineRestarting
from modulm_server.engine.core_client import EngineCoreClient, WorkerCall
from modulm_server.engine.engine_calls import call_all, then, without_result
from modulm_server.engine.process_client import ProcessCoreClient
from modulm_server.engine.replica_processes import Replica, call_workers, run_weights

if TYPE_CHECKING:
    from modulm_server.engine.adapters import Adapter

__all__ = ["ReplicaCalls"]

T = TypeVar("T")


class ReplicaCalls(EngineCoreClient):
    """The operations of a `ReplicaSet` that all its replicas carry out."""

    _replicas: Sequence[Replica]
    _lock: threading.Lock
    _ended: threading.Event

    @property
    @abstractmethod
    def router(self) -> Router:
        """The router."""

    @property
    def adapters(self) -> Mapping[str, Adapter]:  # type: ignore[override]
        """The adapters of any running replica, since all have the same; if none runs, the last
        known ones.
        """
        return self._common_adapters() or {
            one.name: one for replica in self._replicas for one in replica.adapters
        }

    def _common_adapters(self) -> Mapping[str, Adapter]:
        return next((client.adapters for _, client in self._available()), {})

    def _available(self) -> list[tuple[int, ProcessCoreClient]]:
        """The replicas that take requests."""
        return [
            (i, r.client) for i, r in enumerate(self._replicas) if r.up and r.client is not None
        ]

    def _all(
        self,
        call: Callable[[ProcessCoreClient], Future[T]],
        undo: Callable[[ProcessCoreClient], object] | None = None,
    ) -> Future[list[T]]:
        """Call all replicas that take requests. undo: called for the others if one fails."""
        answers = call_all([client for _, client in self._available()], call, undo)
        if answers is None:
            answers = Future()
            answers.set_exception(self.down or EngineStalled("no replica accepts requests"))
            return answers
        return self._restarting(answers)

    def _restarting(self, answers: Future[T]) -> Future[T]:
        """The same future; a replica's death meanwhile is EngineRestarting until the set ends."""
        outcome = Future[T]()
        outcome.set_running_or_notify_cancel()

        def done(answers: Future[T]) -> None:
            error = answers.exception()
            if error is None:
                outcome.set_result(answers.result())
            elif isinstance(error, EngineDead) and not self._ended.is_set():
                outcome.set_exception(EngineRestarting(str(error)))
            else:
                outcome.set_exception(error)

        answers.add_done_callback(done)
        return outcome

    def refresh_adapters(self) -> Future[None]:
        return without_result(self._all(lambda client: client.refresh_adapters()))

    def load_adapter(self, adapter: Adapter, replace: bool) -> Future[None]:
        known = adapter.name in self.adapters
        undo = None if known else partial(_forget_adapter, adapter.name)
        return without_result(self._all(lambda client: client.load_adapter(adapter, replace), undo))

    def unload_adapter(self, name: str) -> Future[None]:
        return without_result(self._all(lambda client: client.unload_adapter(name)))

    def reset_prefix_cache(self) -> Future[None]:
        with self._lock:
            self.router.forget_prefixes()
        return without_result(self._all(lambda client: client.reset_prefix_cache()))

    def sleep(self, level: int) -> Future[None]:
        with self._lock:
            self.router.forget_prefixes()
        return without_result(self._all(lambda client: client.sleep(level), lambda c: c.wake_up()))

    def wake_up(self) -> Future[None]:
        return without_result(self._all(lambda client: client.wake_up()))

    def is_sleeping(self) -> Future[bool]:
        return then(self._all(lambda client: client.is_sleeping()), all)

    def start_profile(self) -> Future[None]:
        return without_result(self._all(lambda c: c.start_profile(), lambda c: c.stop_profile()))

    def stop_profile(self) -> Future[None]:
        return without_result(self._all(lambda client: client.stop_profile()))

    def call_workers(self, call: WorkerCall) -> Future[list[Any]]:
        return call_workers(self._replicas, call)

    def run_weights(self, operation: str, arguments: Mapping[str, Any]) -> Future[dict[str, Any]]:
        if operation == "finish":
            with self._lock:
                self.router.forget_prefixes()
        return run_weights(self._replicas, operation, arguments)

    def reports(self) -> Future[list[str]]:
        for _, client in self._available():  # each knows all front ends
            return client.reports()
        return super().reports()


def _forget_adapter(name: str, client: ProcessCoreClient) -> None:
    client.unload_adapter(name)
