"""A KV connector that keeps blocks in the memory of each worker, and fails on one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from attrs import frozen

from modulm.contracts.connector import (
    BlockTransfer,
    KVConnector,
    KVIndex,
    KVMover,
    TransferPlan,
    TransferResult,
)


@frozen
class Options:
    """rank: where loads fail; loads: how many of them."""

    rank: int = 1
    loads: int = 1


class MemoryIndex(KVIndex):
    """The names of the blocks that all ranks have stored."""

    def __init__(self) -> None:
        self._stored: set[bytes] = set()

    def match(self, request: str, names: Sequence[bytes], cached: int) -> int:
        missing = (i for i, name in enumerate(names) if name not in self._stored)
        return next(missing, len(names))

    def store(self, names: Sequence[bytes]) -> None:
        self._stored.update(names)


class MemoryMover(KVMover):
    """Copies this rank's part of the blocks. A load that fails leaves its blocks spoilt."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._store: dict[tuple[bytes, int, int], torch.Tensor] = {}
        self._done: list[int] = []
        self._failed: list[tuple[int, str]] = []

    def open(
        self, caches: Mapping[int, Sequence[torch.Tensor]], *, rank: int = 0, ranks: int = 1
    ) -> None:
        self._caches = caches
        self._to_fail = self._options.loads if rank == self._options.rank else 0

    def begin(self, plan: TransferPlan) -> None:
        for save in plan.saves:
            for key, block in self._blocks(save):
                self._store[key] = block.clone()
            self._done.append(save.id)
        for load in plan.loads:
            if any(key not in self._store for key, _ in self._blocks(load)):
                self._failed.append((load.id, "not stored here"))
                continue
            fails, self._to_fail = self._to_fail > 0, self._to_fail - 1
            for key, block in self._blocks(load):
                block.copy_(torch.full_like(block, -7) if fails else self._store[key])
            if fails:
                self._failed.append((load.id, "the link is down"))
            else:
                self._done.append(load.id)

    def _blocks(self, transfer: BlockTransfer) -> list[tuple[tuple[bytes, int, int], torch.Tensor]]:
        """The blocks of a transfer in all layers, and what they are stored as."""
        return [
            ((name, group, layer), cache[block])
            for group, blocks in enumerate(transfer.blocks)
            for name, block in zip(transfer.names, blocks, strict=True)
            for layer, cache in enumerate(self._caches[group])
        ]

    def ended(self) -> TransferResult:
        result = TransferResult(tuple(self._done), tuple(self._failed))
        self._done, self._failed = [], []
        return result


class FaultyConnector(KVConnector):
    """Loads fail on one rank."""

    name: ClassVar[str] = "faulty"
    api: ClassVar[int | tuple[int, int]] = 3
    Config: ClassVar[type] = Options

    def index(self) -> MemoryIndex:
        return MemoryIndex()

    def mover(self) -> MemoryMover:
        if not isinstance(self.config, Options):
            raise TypeError("the connector was given options of another")
        return MemoryMover(self.config)
