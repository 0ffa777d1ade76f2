"""Runs the requests of dead replicas again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from modulm.errors import EngineError, EngineStalled, ReplicaDied

if TYPE_CHECKING:
    from modulm.contracts.requests import Request
    from modulm_frontend.output_processor import OutputProcessor, RequestState
    from modulm_server.engine.core_client import EngineCoreClient, ReplicaLost

__all__ = ["Restarts"]

#: Maximum times a request is started on replicas that die, before it fails.
_BEGINNINGS = 2


class Restarts:
    """The requests of a front end that can run again, from the start, on another replica.

    Those are the ones whose caller has received nothing. A request that ran on two dead replicas
    fails, because it may be the cause.
    """

    def __init__(self, core: EngineCoreClient, outputs: OutputProcessor) -> None:
        self._core = core
        self._outputs = outputs
        #: By request id: the request's state, its sequences, and on how many dead replicas it ran.
        self._requests: dict[str, tuple[RequestState, Sequence[Request], int]] = {}
        #: Ids of requests that start as soon as a replica takes requests.
        self._postponed: list[str] = []

    def add(self, state: RequestState, requests: Sequence[Request]) -> None:
        """Record a request that is about to be submitted."""
        self._requests[state.id] = state, requests, 0

    def forget(self, state: RequestState) -> None:
        """Forget a request that has ended."""
        self._requests.pop(state.id, None)

    def handle_lost(self, lost: ReplicaLost) -> list[RequestState]:
        """Restart the requests of a dead replica, or fail them; returns the failed ones. They wait
        if no replica takes requests now.
        """
        failed = []
        for state in self._outputs.requests_of(lost.sequences):
            _, requests, starts = self._requests.get(state.id, (state, (), 0))
            starts += state.cached is not None
            if requests and not state.streamed and starts < _BEGINNINGS:
                self._requests[state.id] = state, requests, starts
                self._outputs.restart(state)
                failed += self._submit(state, requests)
            else:
                failed += self._fail(state, lost.error)
        return failed

    def submit_postponed(self) -> list[RequestState]:
        """Start the requests that waited for a replica; returns those that failed."""
        postponed, self._postponed = self._postponed, []
        failed = []
        for request_id in postponed:
            state, requests, _ = self._requests.get(request_id, (None, (), 0))
            if state is not None and not state.finished:
                failed += self._submit(state, requests)
        return failed

    def _submit(self, state: RequestState, requests: Sequence[Request]) -> list[RequestState]:
        try:
            self._core.submit(requests)
        except EngineStalled:
            self._postponed.append(state.id)
        except EngineError as error:
            return self._fail(state, error)
        return []

    def _fail(self, state: RequestState, error: Exception) -> list[RequestState]:
        self._outputs.fail(state, ReplicaDied(f"its replica is gone: {error}"))
        return [state]
