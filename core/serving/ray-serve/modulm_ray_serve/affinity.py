"""Which replica of a deployment a request is sent to, by `modulm_fleet.router`'s arithmetic.

A front does not tokenize. Four bytes of a prompt's text stand for a token, which is about right,
and an adapter that a replica would have to load counts as a prompt that it would have to compute.
Nothing here knows Ray.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

import msgspec
from attrs import define, field

from modulm.engine.kv_cache.prefix_index import hasher
from modulm.errors import EngineStalled
from modulm_fleet.prefixes import PrefixNames
from modulm_fleet.router import Router

__all__ = ["Affinity", "Route", "route"]

#: Words of four bytes in a piece: a block of the engine's cache, about.
_BLOCK = 16
#: Tokens that a cache is taken to hold until its replica has said so.
_CAPACITY = 1 << 17
#: Prompt tokens that reading an adapter counts as.
_LOADING = 4096
#: Bytes of a prompt that are looked at: images and sounds come as text too.
_LOOKED_AT = 1 << 18
#: Members of a body in the order in which templates put them into a prompt.
_TEXTS = (
    "tools", "system", "instructions", "messages", "prompt", "input", "query", "queries", "text_1",
    "documents", "text_2",
)  # fmt: skip

_names = PrefixNames(_BLOCK)
_name = hasher("sha256")


@define(eq=False)
class Route:
    """What a request is sent by. It stays in the front: the replica gets an empty one.

    names, ends: the pieces of the prompt and where each ends, in tokens; tokens: all of it.
    """

    names: list[bytes]
    ends: list[int]
    tokens: int
    id: str = field(factory=lambda: uuid4().hex)
    affinity: Affinity | None = None
    replica: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Route, ([], [], 0, "")

    def gave(self) -> None:
        """The replica has begun to answer: the prompt is computed."""
        if self.affinity is not None:
            self.affinity.gave(self)

    def ended(self) -> None:
        """Nothing more comes."""
        if self.affinity is not None:
            self.affinity.ended(self)

    def dead(self) -> None:
        """The replica said that its engine is dead: it is to get no more requests."""
        if self.affinity is not None and self.replica is not None:
            self.affinity.down(self.replica)


def route(body: Mapping[str, Any], adapter: str | None, tenant: bytes) -> Route:
    """The route of a decoded body. tenant: what separates those who share no cache."""
    data = b"".join(msgspec.json.encode(body[name]) for name in _TEXTS if body.get(name))
    data = data[:_LOOKED_AT]
    extra = tenant
    if isinstance(salt := body.get("cache_salt"), str):
        extra += b"\0" + salt.encode()
    tokens = -(-len(data) // 4)
    if adapter is None:
        names, ends = _names.words(data, extra)
        return Route(names, ends, tokens)
    first = _adapter_name(adapter)
    names, ends = _names.words(data, first + extra)
    return Route([first, *names], [_LOADING, *(_LOADING + end for end in ends)], _LOADING + tokens)


def _adapter_name(adapter: str) -> bytes:
    """What having loaded an adapter is called."""
    return _name(b"", b"", b"adapter " + adapter.encode())


@define(eq=False)
class Affinity:
    """One front's knowledge of a deployment's replicas, which have names. For any thread.

    slots: replicas at most, those that are ending included; shared: whether there are more fronts.
    """

    slots: int
    shared: bool = False
    _router: Router = field(init=False)
    _places: dict[str, int] = field(factory=dict)
    _lock: threading.Lock = field(factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        self._router = Router(self.slots, _BLOCK, _CAPACITY, shared=self.shared)
        for place in range(self.slots):
            self._router.down(place)

    def update(self, replicas: Mapping[str, tuple[int, Iterable[str]]]) -> None:
        """These are all that take requests, each with the tokens that its cache holds, 0 if it
        has not said so, and the adapters that it has.
        """
        with self._lock:
            for name in self._places.keys() - replicas.keys():
                self._router.lost(self._places.pop(name))
            for name, (capacity, adapters) in replicas.items():
                if name not in self._places and len(self._places) < self.slots:
                    self._places[name] = place = self._free(name)
                    self._router.up(place)
                if capacity:
                    self._router.held.capacity = capacity
                for adapter in adapters if name in self._places else ():
                    self._router.held.add(self._places[name], [_adapter_name(adapter)], [_LOADING])

    def _free(self, name: str) -> int:
        """A place for a replica, mostly the same one in all fronts."""
        taken = set(self._places.values())
        place = zlib.crc32(name.encode()) % self.slots
        while place in taken:
            place = (place + 1) % self.slots
        return place

    def choose(self, asked: Route) -> str | None:
        """The replica for a request, which counts as sent; None if none takes requests."""
        with self._lock:
            self._router.ended(asked.id)
            asked.affinity = self
            try:
                place = self._router.send_named([asked.id], asked.names, asked.ends, asked.tokens)
            except EngineStalled:
                asked.replica = None
                return None
            asked.replica = next(name for name, own in self._places.items() if own == place)
            return asked.replica

    def sent(self, asked: Route, replica: str) -> None:
        """Where a request went in the end: the one that was chosen may have been full."""
        if asked.replica == replica:
            return
        with self._lock:
            self._router.ended(asked.id)
            asked.replica, place = replica, self._places.get(replica)
            if place is not None:
                self._router.sent(place, [asked.id], asked.names, asked.ends, asked.tokens)

    def gave(self, asked: Route) -> None:
        """A request is being answered."""
        with self._lock:
            place = self._router.replica(asked.id)
            if place is not None:
                self._router.gave(place, [asked.id])

    def ended(self, asked: Route) -> None:
        """A request has ended, however."""
        with self._lock:
            self._router.ended(asked.id)

    def heard(self, replica: str, requests: int) -> None:
        """A replica says how many requests it has, of all fronts."""
        with self._lock:
            place = self._places.get(replica)
            if place is not None:
                self._router.heard(place, requests)

    def down(self, replica: str) -> None:
        """A replica takes no requests any more; Ray Serve will say when there is another."""
        with self._lock:
            place = self._places.get(replica)
            if place is not None:
                self._router.down(place)
