"""Choose the replica of a deployment for a request, with `modulm_fleet.router`.

The ingress does not tokenize: four bytes of a prompt's text count as a token, and an adapter that a
replica would have to load counts as a prompt to compute. This module does not import Ray.
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
from modulm_fleet.prefixes import PrefixHasher
from modulm_fleet.router import Router

__all__ = ["Affinity", "Route", "route"]

#: Tokens (of four bytes) in a piece, about a block of the engine's cache.
_BLOCK = 16
#: Assumed tokens of a cache until its replica has reported them.
_CAPACITY = 1 << 17
#: Prompt tokens that loading an adapter counts as.
_LOADING = 4096
#: Bytes of a prompt that are hashed; images and audio are part of its text.
_HASHED_BYTES = 1 << 18
#: Fields of a body in the order in which templates put them into a prompt.
_TEXTS = (
    "tools", "system", "instructions", "messages", "prompt", "input", "query", "queries", "text_1",
    "documents", "text_2",
)  # fmt: skip

_names = PrefixHasher(_BLOCK)
_name = hasher("sha256")


@define(eq=False)
class Route:
    """The routing data of a request. It stays in the ingress; the replica gets an empty one.

    names, ends: hashes of the pieces of the prompt, and where each ends, in tokens. tokens: length
    of the prompt.
    """

    names: list[bytes]
    ends: list[int]
    tokens: int
    id: str = field(factory=lambda: uuid4().hex)
    affinity: Affinity | None = None
    replica: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Route, ([], [], 0, "")

    def mark_answering(self) -> None:
        """Record that the replica has begun to answer, so the prompt is computed."""
        if self.affinity is not None:
            self.affinity.record_tokens(self)

    def finish(self) -> None:
        """Record the end of the request."""
        if self.affinity is not None:
            self.affinity.record_end(self)

    def mark_dead(self) -> None:
        """Send the replica no more requests, because its engine is dead."""
        if self.affinity is not None and self.replica is not None:
            self.affinity.disable(self.replica)


def route(body: Mapping[str, Any], adapter: str | None, tenant: bytes) -> Route:
    """The route of a decoded body. tenant: separates clients that share no cache."""
    data = b"".join(msgspec.json.encode(body[name]) for name in _TEXTS if body.get(name))
    data = data[:_HASHED_BYTES]
    extra = tenant
    if isinstance(salt := body.get("cache_salt"), str):
        extra += b"\0" + salt.encode()
    tokens = -(-len(data) // 4)
    if adapter is None:
        names, ends = _names.hash_text(data, extra)
        return Route(names, ends, tokens)
    first = _adapter_name(adapter)
    names, ends = _names.hash_text(data, first + extra)
    return Route([first, *names], [_LOADING, *(_LOADING + end for end in ends)], _LOADING + tokens)


def _adapter_name(adapter: str) -> bytes:
    """The hash that stands for a loaded adapter."""
    return _name(b"", b"", b"adapter " + adapter.encode())


@define(eq=False)
class Affinity:
    """What one ingress replica knows of a deployment's replicas, by name. Thread-safe.

    slots: maximum replicas, including ending ones. shared: whether there are more ingress replicas.
    """

    slots: int
    shared: bool = False
    _router: Router = field(init=False)
    _indices: dict[str, int] = field(factory=dict)
    _lock: threading.Lock = field(factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        self._router = Router(self.slots, _BLOCK, _CAPACITY, shared=self.shared)
        for index in range(self.slots):
            self._router.disable(index)

    def update(self, replicas: Mapping[str, tuple[int, Iterable[str]]]) -> None:
        """Set the replicas that take requests: name -> tokens of its cache (0: unknown) and loaded
        adapters.
        """
        with self._lock:
            for name in self._indices.keys() - replicas.keys():
                self._router.remove(self._indices.pop(name))
            for name, (capacity, adapters) in replicas.items():
                if name not in self._indices and len(self._indices) < self.slots:
                    self._indices[name] = index = self._free(name)
                    self._router.enable(index)
                if capacity:
                    self._router.prefixes.capacity = capacity
                for adapter in adapters if name in self._indices else ():
                    self._router.prefixes.add(
                        self._indices[name], [_adapter_name(adapter)], [_LOADING]
                    )

    def _free(self, name: str) -> int:
        """A free index for a replica, usually the same in all ingress replicas."""
        used = set(self._indices.values())
        index = zlib.crc32(name.encode()) % self.slots
        while index in used:
            index = (index + 1) % self.slots
        return index

    def choose(self, route: Route) -> str | None:
        """Choose and record the replica for a request; None if no replica accepts requests."""
        with self._lock:
            self._router.record_end(route.id)
            route.affinity = self
            try:
                index = self._router.send_named([route.id], route.names, route.ends, route.tokens)
            except EngineStalled:
                route.replica = None
                return None
            route.replica = next(name for name, known in self._indices.items() if known == index)
            return route.replica

    def record_sent(self, route: Route, replica: str) -> None:
        """Record the replica that took a request; the chosen one may have been full."""
        if route.replica == replica:
            return
        with self._lock:
            self._router.record_end(route.id)
            route.replica, index = replica, self._indices.get(replica)
            if index is not None:
                self._router.record_sent(index, [route.id], route.names, route.ends, route.tokens)

    def record_tokens(self, route: Route) -> None:
        """Record that a request is being answered."""
        with self._lock:
            index = self._router.replica(route.id)
            if index is not None:
                self._router.record_tokens(index, [route.id])

    def record_end(self, route: Route) -> None:
        """Record the end of a request."""
        with self._lock:
            self._router.record_end(route.id)

    def record_load(self, replica: str, requests: int) -> None:
        """Record how many requests a replica has, from all ingress replicas."""
        with self._lock:
            index = self._indices.get(replica)
            if index is not None:
                self._router.record_load(index, requests)

    def disable(self, replica: str) -> None:
        """Send no more requests to a replica, until Ray Serve reports a new one."""
        with self._lock:
            index = self._indices.get(replica)
            if index is not None:
                self._router.disable(index)
