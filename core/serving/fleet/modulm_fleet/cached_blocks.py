"""The blocks that replicas have in their prefix caches, by the events that they publish.

Events identify a block by the last 64 bits of the engine's name for it. That name may differ
between replicas: Python's own hash has a seed, and updated weights are part of names. So a block is
named again from the tokens in its event. Only what else it depends on (salt, adapter, media) is not
in events; such blocks, and those after them, keep the engine's hash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field

from modulm.engine.kv_cache.prefix_index import block_extra, hasher

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from modulm.contracts.requests import Request

__all__ = ["CachedBlocks"]


def _hash(name: bytes) -> int:
    return int.from_bytes(name[-8:], "big")


@define(eq=False)
class _Blocks:
    """What one replica has cached. names: a block's hash in events -> its name here, or b"".

    complete: no event is missing. alike: the engine's hashes are those of the names here. opaque:
    there are blocks that could not be named again.
    """

    names: dict[int, bytes] = field(factory=dict)
    complete: bool = False
    alike: bool = True
    opaque: bool = False

    @property
    def exact(self) -> bool:
        """Whether a prompt that is not found here is not cached."""
        return self.complete and (self.alike or not self.opaque)


class CachedBlocks:
    """The blocks of each replica. Not thread-safe.

    block: tokens per block. most: blocks of a replica beyond which its events are not believed.
    """

    def __init__(self, replicas: int, block: int, most: int, algorithm: str = "sha256") -> None:
        # As in `PrefixHasher`: front ends name alike, whatever the engines do.
        self._name = hasher("sha256" if algorithm == "builtin" else algorithm)
        self._block, self._most = block, most
        self._replicas = [_Blocks() for _ in range(replicas)]
        self._holders: dict[int, set[int]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def is_exact(self, replica: int) -> bool:
        """Whether all that a replica has cached is known."""
        return self._replicas[replica].exact

    def reset(self, replica: int, complete: bool) -> None:
        """Forget a replica's blocks. complete: it has none, and each further event will be seen."""
        for hashed, name in self._replicas[replica].names.items():
            self._drop(replica, _hash(name) if name else hashed)
        self._replicas[replica] = _Blocks(complete=complete)

    def apply(self, replica: int, events: Sequence[Any]) -> None:
        """Apply the events of one batch. Raises ValueError if one has another layout."""
        blocks = self._replicas[replica]
        for kind, *fields in events:
            if kind == "AllBlocksCleared":
                self.reset(replica, complete=True)
                blocks = self._replicas[replica]
            elif kind == "BlockRemoved":
                for hashed in fields[0]:
                    name = blocks.names.pop(hashed, None)
                    if name is not None:
                        self._drop(replica, _hash(name) if name else hashed)
            elif kind == "BlockStored":
                self._store(replica, blocks, *fields)
            else:
                raise ValueError(f"an event {kind!r}")

    def _store(
        self, replica: int, blocks: _Blocks, hashes: Sequence[int], parent: int | None,
        tokens: Sequence[int], size: int, _lora: Any = None, medium: str = "GPU",
        adapter: str | None = None, extra: Sequence[Any] | None = None,
    ) -> None:  # fmt: skip
        if size != self._block or len(tokens) != size * len(hashes):
            raise ValueError(f"{len(tokens)} tokens in {len(hashes)} blocks of {size}")
        data, width = np.asarray(tokens, np.int32).tobytes(), 4 * size
        before = b"" if parent is None else blocks.names.get(parent, b"")
        plain = adapter is None and (parent is None or bool(before))
        for index, hashed in enumerate(hashes):
            plain = plain and not (extra and extra[index])
            name = b""
            if plain:
                name = self._name(before, data[width * index : width * (index + 1)], b"")
                blocks.alike = blocks.alike and _hash(name) == hashed
            blocks.opaque = blocks.opaque or not plain
            blocks.names[hashed] = before = name
            self._holders.setdefault(_hash(name) if name else hashed, set()).add(replica)
        if len(blocks.names) > self._most:
            raise ValueError(f"more than {self._most} blocks in a replica's cache")

    def _drop(self, replica: int, key: int) -> None:
        holders = self._holders.get(key)
        if holders is not None:
            holders.discard(replica)
            if not holders:
                del self._holders[key]

    def cached(self, request: Request) -> Mapping[int, int]:
        """Return how many tokens at the beginning of the prompt each replica has, if any."""
        found: dict[int, int] = {}
        if not self._holders:
            return found
        size, name, plain = self._block, b"", not request.media and not request.adapter_from
        data = request.prompt.astype(np.int32).tobytes()
        holders: AbstractSet[int] | None = None
        for end in range(size, request.prompt_len + 1, size):
            start = end - size
            extra = b"" if start and plain else block_extra(request, start, end)
            name = self._name(name, data[4 * start : 4 * end], extra)
            here = self._holders.get(_hash(name), set())
            if holders is None:
                holders = here
            elif not holders <= here:
                found.update(dict.fromkeys(holders - here, start))
                holders = holders & here
            if not holders:
                return found
        found.update(dict.fromkeys(holders or (), request.prompt_len // size * size))
        return found
