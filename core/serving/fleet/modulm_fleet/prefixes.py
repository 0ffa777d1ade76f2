"""Hashes of prompt prefixes, and which replica has cached which.

A piece of a prompt is named by the hash that the engine's prefix cache uses for a block: over the
parent's hash, the tokens and whatever else their keys and values depend on. The first pieces are
one block long, later ones longer, so a long prompt costs little more than a short one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field

from modulm.engine.kv_cache.prefix_index import block_extra, hasher

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from modulm.contracts.requests import Request

__all__ = ["CachedPrefixes", "PrefixHasher"]

#: Pieces of equal length before the length doubles, so a shared prefix is found to within an
#: eighth of its length.
_ALIKE = 8


class PrefixHasher:
    """Hashes the pieces of prompts. block: tokens of a block of the engine's cache."""

    def __init__(self, block: int, algorithm: str = "sha256") -> None:
        # Python's own hash differs between processes, and front ends must agree.
        self._name = hasher("sha256" if algorithm == "builtin" else algorithm)
        self._block = block
        self._ends: list[int] = []

    def __call__(self, request: Request) -> tuple[list[bytes], list[int]]:
        """The hashes of the prompt's whole pieces, and where each piece ends, in tokens."""
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

    def hash_text(self, data: bytes, extra: bytes) -> tuple[list[bytes], list[int]]:
        """Hash a prompt of which only the text is known: four bytes of `data` stand for a token.

        extra: what else the cached content depends on.
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
        """The ends of all pieces up to `length`, possibly more."""
        ends = self._ends
        while not ends or ends[-1] < length:
            pieces = self._block << len(ends) // _ALIKE
            ends.append((ends[-1] if ends else 0) + pieces)
        return ends


@define(eq=False)
class CachedPrefixes:
    """The pieces that each replica has cached, as far as one front end knows.

    The least recently used pieces of a replica are dropped when they exceed its cache (capacity, in
    tokens; 0: no prefix cache).
    """

    replicas: int
    capacity: int
    _holders: dict[bytes, list[int]] = field(factory=dict)
    _pieces: list[dict[bytes, int]] = field(init=False)
    _tokens: list[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._pieces = [{} for _ in range(self.replicas)]
        self._tokens = [0] * self.replicas

    def __len__(self) -> int:
        return len(self._holders)

    def holders(self, name: bytes) -> list[int] | None:
        """The replicas that hold a piece. Do not modify the list."""
        return self._holders.get(name)

    def holds(self, replica: int, name: bytes) -> bool:
        """Whether a replica holds a piece."""
        return name in self._pieces[replica]

    def add(self, replica: int, names: list[bytes], ends: list[int]) -> None:
        """Record that a replica will hold these pieces of one prompt.

        The first pieces count as most recently used, because later ones depend on them.
        """
        pieces, holders, tokens = self._pieces[replica], self._holders, self._tokens[replica]
        for index in range(len(names) - 1, -1, -1):
            name = names[index]
            size = pieces.pop(name, 0)
            if not size:
                size = ends[index] - (ends[index - 1] if index else 0)
                tokens += size
                holders.setdefault(name, []).append(replica)
            pieces[name] = size
        while tokens > self.capacity:
            name = next(iter(pieces))
            tokens -= pieces.pop(name)
            self._remove(replica, name)
        self._tokens[replica] = tokens

    def keep(self, replica: int, names: AbstractSet[bytes]) -> None:
        """Record that a replica holds no other pieces than these."""
        pieces = self._pieces[replica]
        for name in [name for name in pieces if name not in names]:
            self._tokens[replica] -= pieces.pop(name)
            self._remove(replica, name)

    def forget(self, replica: int) -> None:
        """Record that a replica holds nothing."""
        for name in self._pieces[replica]:
            self._remove(replica, name)
        self._pieces[replica] = {}
        self._tokens[replica] = 0

    def _remove(self, replica: int, name: bytes) -> None:
        holders = self._holders[name]
        holders.remove(replica)
        if not holders:
            del self._holders[name]
