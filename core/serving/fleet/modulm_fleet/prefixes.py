"""Names of what prompts begin with, and which replica holds what of it.

A name is what an engine's own prefix cache calls a block: a hash over the name before, tokens and
whatever else their keys and values depend on. Here the first pieces of a prompt are one block
long and later ones longer, so that a long prompt costs little more than a short one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field

from modulm.engine.kv_cache.prefix_index import block_extra, hasher

if TYPE_CHECKING:
    from modulm.contracts.requests import Request

__all__ = ["HeldPrefixes", "PrefixNames"]

#: Pieces of a prompt of one length, before they become twice as long: what is shared is found to
#: within an eighth.
_ALIKE = 8


class PrefixNames:
    """Names prompts piece by piece. block: tokens of a block of the engine's cache."""

    def __init__(self, block: int, algorithm: str = "sha256") -> None:
        # Python's own hash differs from process to process, and front ends are to agree.
        self._name = hasher("sha256" if algorithm == "builtin" else algorithm)
        self._block = block
        self._ends: list[int] = []

    def __call__(self, request: Request) -> tuple[list[bytes], list[int]]:
        """The names of the prompt's whole pieces, and where each piece ends, in tokens."""
        length = request.prompt_len
        ends = self._until(length)
        data = request.prompt.astype(np.int32).tobytes()
        plain = not request.media and not request.adapter_from
        name, names, parent, start = self._name, [], b"", 0
        for end in ends:
            if end > length:
                break
            extra = b"" if start and plain else block_extra(request, start, end)
            parent = name(parent, data[4 * start : 4 * end], extra)
            names.append(parent)
            start = end
        return names, ends

    def words(self, data: bytes, extra: bytes) -> tuple[list[bytes], list[int]]:
        """As of a request whose tokens are the whole words of four bytes in `data`: for those who
        have a prompt's text only. extra: what the content depends on besides.
        """
        length, names, parent, start = len(data) // 4, [], b"", 0
        ends = self._until(length)
        for end in ends:
            if end > length:
                break
            parent = self._name(parent, data[4 * start : 4 * end], b"" if start else extra)
            names.append(parent)
            start = end
        return names, ends[: len(names)]

    def _until(self, length: int) -> list[int]:
        """The ends of all pieces up to `length`, and perhaps of more."""
        ends = self._ends
        while not ends or ends[-1] < length:
            pieces = self._block << len(ends) // _ALIKE
            ends.append((ends[-1] if ends else 0) + pieces)
        return ends


@define(eq=False)
class HeldPrefixes:
    """Which replica holds which pieces, as far as one front end knows.

    A replica's pieces that were used longest ago are forgotten when they are more tokens than its
    cache holds: capacity, 0 for a cache that keeps none.
    """

    replicas: int
    capacity: int
    _holders: dict[bytes, list[int]] = field(factory=dict)
    _held: list[dict[bytes, int]] = field(init=False)
    _tokens: list[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._held = [{} for _ in range(self.replicas)]
        self._tokens = [0] * self.replicas

    def __len__(self) -> int:
        return len(self._holders)

    def holders(self, name: bytes) -> list[int] | None:
        """The replicas that hold a piece; not to be changed."""
        return self._holders.get(name)

    def holds(self, replica: int, name: bytes) -> bool:
        """Whether a replica holds a piece."""
        return name in self._held[replica]

    def add(self, replica: int, names: list[bytes], ends: list[int]) -> None:
        """A replica is about to hold these pieces of one prompt.

        The first pieces count as used last: what later ones build on is forgotten after them.
        """
        held, holders, tokens = self._held[replica], self._holders, self._tokens[replica]
        for place in range(len(names) - 1, -1, -1):
            name = names[place]
            size = held.pop(name, 0)
            if not size:
                size = ends[place] - (ends[place - 1] if place else 0)
                tokens += size
                holders.setdefault(name, []).append(replica)
            held[name] = size
        while tokens > self.capacity:
            name = next(iter(held))
            tokens -= held.pop(name)
            self._lost(replica, name)
        self._tokens[replica] = tokens

    def forget(self, replica: int) -> None:
        """A replica holds nothing any more."""
        for name in self._held[replica]:
            self._lost(replica, name)
        self._held[replica] = {}
        self._tokens[replica] = 0

    def _lost(self, replica: int, name: bytes) -> None:
        found = self._holders[name]
        found.remove(replica)
        if not found:
            del self._holders[name]
