"""A KV connector that stores blocks in host memory: a fixed number of slots, LRU eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import ClassVar

import torch
from attrs import field, frozen
from attrs.validators import ge

from modulm.contracts.connector import (
    BlockHold,
    BlockTransfer,
    KVConnector,
    KVIndex,
    KVMover,
)
from modulm.errors import ConfigError
from modulm_kv_transfer.copies import CopyingMover, TransferFailed
from modulm_kv_transfer.holds import HeldBlocks

__all__ = ["HostConnector", "HostOptions"]


@frozen
class HostOptions:
    """cpu_bytes_to_use: memory of all ranks together. store_threshold: number of requests that must
    begin with a block before it is saved; 0: every full block is saved.
    """

    cpu_bytes_to_use: int = field(default=4 << 30, validator=ge(1))
    store_threshold: int = field(default=0, validator=ge(0))


class _Index(KVIndex):
    """Names of the blocks that all ranks have stored."""

    medium = "host"
    #: Maximum names counted for `store_threshold`.
    counted = 1 << 20

    def __init__(self, threshold: int) -> None:
        self._stored: set[bytes] = set()
        self._threshold = threshold
        self._asked: OrderedDict[bytes, int] = OrderedDict()
        #: Requests already counted: the scheduler may ask several times.
        self._seen: set[str] = set()

    def match(self, request: str, names: Sequence[bytes], cached: int) -> int:
        if self._threshold and request not in self._seen:
            self._seen.add(request)
            for name in names:
                self._asked[name] = self._asked.pop(name, 0) + 1
            while len(self._asked) > self.counted:
                self._asked.popitem(last=False)
        missing = (index for index, name in enumerate(names) if name not in self._stored)
        return next(missing, len(names))

    def blocks_to_save(self, request: str, names: Sequence[bytes]) -> int:
        if not self._threshold:
            return len(names)
        rare = (
            index for index, name in enumerate(names) if self._asked.get(name, 0) < self._threshold
        )
        return next(rare, len(names))

    def store(self, names: Sequence[bytes]) -> None:
        self._stored.update(names)

    def remove(self, names: Sequence[bytes]) -> None:
        self._stored.difference_update(names)

    def finish(self, request: str) -> None:
        self._seen.discard(request)


class _Mover(CopyingMover):
    """This rank's stored blocks, one per slot of `memory` [slots, width] uint8."""

    def __init__(self, size: int, share: float, per_key: float) -> None:
        super().__init__()
        self._size, self._shares = size, (share, per_key)
        self._slots: dict[bytes, int] = {}
        #: Stored names that are not held, least recently used first.
        self._loose: OrderedDict[bytes, None] = OrderedDict()

    def prepare(self) -> None:
        slots = self._size // self.ranks // self.copier.width if self.copier.width else 0
        if slots < 1:
            needed = self.copier.width * self.ranks
            raise ConfigError(
                "kv_offloading_size",
                f"{self._size} bytes are too small for a block of {needed} bytes",
            )
        self.memory = self.copier.buffer(slots)
        self._free = list(range(slots))
        self._held = HeldBlocks(slots, *self._shares, self._release)

    def save(self, transfer: BlockTransfer) -> None:
        new = [i for i, name in enumerate(transfer.names) if name not in self._slots]
        self._touch(transfer.names)
        room = self._make_room(len(new), frozenset(transfer.names))
        self.forget([transfer.names[i] for i in new[room:]])
        new, slots = new[:room], [self._free.pop() for _ in range(room)]
        blocks = [[ids[index] for index in new] for ids in transfer.blocks]
        try:
            self.copier.save(blocks, [self.memory[slot] for slot in slots])
            self.synchronize()
        except BaseException:
            self._free += slots
            raise
        names = [transfer.names[index] for index in new]
        self._slots.update(zip(names, slots, strict=True))
        self._loose.update((name, None) for name in names if name not in self._held)
        self._touch(transfer.names)

    def _make_room(self, count: int, wanted: Container[bytes]) -> int:
        """Free up to `count` slots of the blocks that were used the longest ago, and return how
        many there are. Held and wanted blocks stay.
        """
        self._held.expire()
        evicted = []
        while len(self._free) < count and self._loose:
            name = next(iter(self._loose))
            if name in wanted:
                break
            del self._loose[name]
            self._free.append(self._slots.pop(name))
            evicted.append(name)
        self.forget(evicted)
        return min(count, len(self._free))

    def _touch(self, names: Sequence[bytes]) -> None:
        """Mark blocks as used now. The end of a prefix is evicted before its beginning."""
        for name in reversed(names):
            if name in self._loose:
                self._loose.move_to_end(name)

    def hold(self, hold: BlockHold) -> None:
        for name in self._held.hold(hold):
            self._loose.pop(name, None)

    def _release(self, names: Sequence[bytes]) -> None:
        """Let blocks be evicted again; as used now."""
        self._loose.update((name, None) for name in reversed(names) if name in self._slots)

    def load(self, transfer: BlockTransfer) -> None:
        missing = [name for name in transfer.names if name not in self._slots]
        if missing:
            self.forget(missing)
            raise TransferFailed(f"{len(missing)} blocks are no longer in host memory")
        self._touch(transfer.names)
        stored: list[torch.Tensor] = [self.memory[self._slots[name]] for name in transfer.names]

        def load(_: int, part: range) -> None:
            at = slice(part.start, part.stop)
            self.copier.load([ids[at] for ids in transfer.blocks], stored[at])

        self.spread(len(stored), load)


class HostConnector(KVConnector):
    """Stores blocks in host memory, pinned if the device is not the CPU."""

    name: ClassVar[str] = "host"
    api: ClassVar[int | tuple[int, int]] = 3
    Config: ClassVar[type] = HostOptions

    config: HostOptions
    _shares = (0.0, 0.0)

    def limit_holds(self, share: float, per_key: float) -> None:
        self._shares = share, per_key

    def index(self) -> KVIndex:
        return _Index(self.config.store_threshold)

    def mover(self) -> KVMover:
        return _Mover(self.config.cpu_bytes_to_use, *self._shares)
