"""Requests in progress, by the ids that their clients know, for those who abort them."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from attrs import define, field

from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from starlette.types import Scope

    from modulm_server.engine.client import EngineClient

__all__ = ["RunningRequest", "RunningRequests", "current_request", "running_requests"]

_current: ContextVar[RunningRequest | None] = ContextVar("modulm_request", default=None)


def current_request() -> RunningRequest | None:
    """The request that the current task answers; None outside of a server."""
    return _current.get()


@define(eq=False)
class RunningRequest:
    """A request in progress. ids: X-Request-Id, and that of the response, with and without its
    prefix. aborted: somebody ended it, and its answer says so in `finish_reason`.
    """

    scope: Scope
    ids: set[str]
    aborted: bool = False
    _generations: list[tuple[EngineClient, str]] = field(factory=list)

    @property
    def has_generations(self) -> bool:
        """Whether the engine works, or has worked, for the request."""
        return bool(self._generations)

    def add_id(self, prefix: str, name: str) -> None:
        """Record the id of the response."""
        self.ids |= {name, f"{prefix}-{name}"}

    def add_generation(self, engine: EngineClient, name: str) -> None:
        """Record a request to the engine that belongs to this one."""
        self._generations.append((engine, name))

    async def abort(self) -> None:
        """End all generations of the request."""
        self.aborted = True
        for engine, name in self._generations:
            await engine.abort(name)


@define(eq=False)
class RunningRequests:
    """All requests in progress of a server process. processes: number of server processes."""

    processes: int = 1
    _requests: set[RunningRequest] = field(factory=set)

    @contextmanager
    def track(self, scope: Scope, name: str) -> Iterator[None]:
        """Count a request as running. name: its X-Request-Id, or what stands for it."""
        request = RunningRequest(scope, {name})
        scope["modulm.running"] = self
        self._requests.add(request)
        token = _current.set(request)
        try:
            yield
        finally:
            _current.reset(token)
            self._requests.discard(request)

    async def abort(self, ids: Collection[str] | None, owner: str | None) -> int:
        """End the requests with these ids, or all; returns how many. Unknown ids are ignored.

        owner: end only requests of this owner's keys; None: of everybody. Raises UnsupportedError
        on a server of several processes.
        """
        if self.processes > 1:
            raise UnsupportedError(
                "requests cannot be aborted by their ids with --api-server-count above 1: each "
                "server process knows only its own; close the connection instead"
            )
        wanted = None if ids is None else set(ids)
        chosen = [
            request
            for request in self._requests
            if request is not current_request()
            and not request.aborted
            and request.has_generations
            and (wanted is None or wanted & request.ids)
            and owner in (None, request.scope.get("modulm.owner", ""))
        ]
        for request in chosen:
            await request.abort()
        return len(chosen)


def running_requests(scope: Scope) -> RunningRequests:
    """The requests in progress of the server that a request came to. Raises UnsupportedError in
    routes that run in a process of their own.
    """
    running: RunningRequests | None = scope.get("modulm.running")
    if running is None:
        raise UnsupportedError("routes in a process of their own (--isolate) abort no requests")
    return running
