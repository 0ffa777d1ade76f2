"""Stores a limited number of responses in memory, accessible only to their owners."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

from attrs import define, field

from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field

if TYPE_CHECKING:
    from collections.abc import Mapping

    from modulm_route_responses.events import Log
    from modulm_route_responses.objects import ResponseObject

__all__ = ["Store", "Stored", "surplus"]

_MOST = 1_000
#: Maximum stored events of finished responses, about 100 MB.
_MOST_FRAMES = 200_000


@define(eq=False)
class Stored:
    """A stored response and its conversation.

    owner: digest of the API key. messages: the conversation as chat messages, including the
    output. items: the conversation as input items, without the output. task: generates it in the
    background. log: its events, if it was created with `background` and `stream`.
    """

    owner: str
    body: ResponseObject
    messages: list[dict[str, Any]] = field(factory=list)
    items: list[dict[str, Any]] = field(factory=list)
    task: asyncio.Task[None] | None = None
    log: Log | None = None

    @property
    def over(self) -> bool:
        """Whether the response is final."""
        return self.body["status"] not in ("queued", "in_progress")


def surplus(owners: Mapping[str, str]) -> str:
    """The name to evict: the oldest one of the owner with the most entries.

    owners: owners by name, oldest first. No owner can thus evict the entries of others.
    """
    ((owner, _),) = Counter(owners.values()).most_common(1)
    return next(name for name, whose in owners.items() if whose == owner)


class Store:
    """The newest responses. Beyond the limit, evicts the oldest of the owner with the most."""

    def __init__(self, max_responses: int = _MOST, max_frames: int = _MOST_FRAMES) -> None:
        self._max_responses = max_responses
        self._max_frames = max_frames
        self._responses: OrderedDict[str, Stored] = OrderedDict()

    def put(self, stored: Stored) -> None:
        """Store a response."""
        self._responses[stored.body["id"]] = stored
        if len(self._responses) <= self._max_responses:
            return
        owners = {
            name: other.owner for name, other in self._responses.items() if other.task is None
        }
        if owners:
            del self._responses[surplus(owners)]

    def check_new(self, name: str | None) -> None:
        """Check that an id that a client chose is not in use. Raises ApiError(400)."""
        if name in self._responses:
            raise bad_field("request_id", "request_id: a response has this id; choose another one")

    def get(self, name: str, owner: str, param: str | None = None) -> Stored:
        """A response by its id. Raises ApiError(404), also for another owner's response."""
        stored = self._responses.get(name)
        if stored is None or stored.owner != owner:
            raise ApiError(404, f"no response {name[:64]!r}", param=param, code="not_found")
        return stored

    def remove(self, name: str) -> None:
        """Remove a response."""
        self._responses.pop(name, None)

    def trim(self) -> None:
        """Drop events of finished responses beyond the limit, of the largest owners first."""
        logs = [stored for stored in self._responses.values() if stored.log is not None]
        excess = sum(len(stored.log.frames) for stored in logs if stored.log) - self._max_frames
        if excess <= 0:
            return
        frames: Counter[str] = Counter()
        for stored in logs:
            frames[stored.owner] += len(stored.log.frames) if stored.log else 0
        logs.sort(key=lambda stored: -frames[stored.owner])
        for stored in logs:
            if excess <= 0:
                return
            if stored.log is not None and stored.log.closed:
                excess -= len(stored.log.frames)
                stored.log = None

    def __len__(self) -> int:
        return len(self._responses)

    async def stop(self) -> None:
        """Cancel all background responses."""
        tasks = [stored.task for stored in self._responses.values() if stored.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
