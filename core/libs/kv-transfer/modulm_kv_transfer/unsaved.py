"""Cached blocks that are saved before they leave the device, instead of when they are computed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

from modulm.contracts.executor import GroupCapacity

__all__ = ["UnsavedBlocks"]


class UnsavedBlocks:
    """The most recently used blocks of the prefix cache are left there; older ones are saved.

    groups, sizes: the cache groups, which have blocks of one size. What is evicted before it was
    saved is computed again.
    """

    def __init__(self, groups: Sequence[Any], sizes: Sequence[GroupCapacity]) -> None:
        smallest = min(group.blocks - 1 for group in sizes)
        #: Blocks that stay unsaved, and that are being saved at once.
        self._left, self.together = smallest * 3 // 4, max(1, smallest // 16)
        self._blocks: OrderedDict[bytes, tuple[str, tuple[int, ...]]] = OrderedDict()
        #: For each group, names that have entered the prefix cache since `settled`.
        self._new: list[set[bytes]] = [set() for _ in groups]
        for group, new in zip(groups, self._new, strict=True):
            group.watch(partial(self._changed, new))

    def _changed(self, new: set[bytes], name: bytes, stored: bool) -> None:
        if stored:
            new.add(name)
        else:
            new.discard(name)
            self._blocks.pop(name, None)

    def add(self, request: str, name: bytes, blocks: Sequence[int]) -> None:
        """Note the blocks of a name, one of each group, if they have just entered the cache.

        Others have the same content as blocks that are in the cache, and may be overwritten.
        """
        if all(name in new for new in self._new):
            self._blocks[name] = request, tuple(blocks)

    def settled(self) -> None:
        """Called when all blocks that entered the cache were added."""
        for new in self._new:
            new.clear()

    def use(self, names: Sequence[bytes]) -> None:
        """Note that a request uses blocks. The end of a prefix is older than its beginning."""
        for name in reversed(names):
            if name in self._blocks:
                self._blocks.move_to_end(name)

    def take(self, most: int) -> list[tuple[str, bytes, tuple[int, ...]]]:
        """Return the request, the name and the blocks of up to `most` that are to be saved now."""
        count = max(0, min(most, len(self._blocks) - self._left))
        oldest = (self._blocks.popitem(last=False) for _ in range(count))
        return [(request, name, blocks) for name, (request, blocks) in oldest]

    def clear(self) -> None:
        """Forget all: the cache is empty."""
        self._blocks.clear()
        self.settled()
