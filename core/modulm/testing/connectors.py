"""A KV connector that stores blocks in a dict, with optional delays, retries and failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from attrs import define, field, frozen

from modulm.contracts.connector import (
    BlockTransfer,
    KVConnector,
    KVIndex,
    KVMover,
    TransferPlan,
    TransferResult,
)
from modulm.errors import EngineError

__all__ = ["FakeConnector"]

Blocks = tuple[tuple[torch.Tensor, ...], ...]


@frozen
class _Options:
    pass


@define(eq=False)
class FakeConnector(KVConnector):
    """Stores blocks in memory.

    `store`: name -> tensors of a block, per group. delay: transfer id -> polls before it ends.
    fails: transfer id -> whether it fails. hesitates: (request, earlier lookups) -> whether the
    index answers "later".
    """

    name: ClassVar[str] = "fake"
    api: ClassVar[int | tuple[int, int]] = 3
    Config: ClassVar[type] = _Options

    delay: Callable[[int], int] = lambda identity: 0
    fails: Callable[[int], bool] = lambda identity: False
    hesitates: Callable[[str, int], bool] = lambda request, asked: False
    store: dict[bytes, Blocks] = field(factory=dict)

    def index(self) -> KVIndex:
        return _Index(self)

    def mover(self) -> KVMover:
        return _Mover(self)


class _Index(KVIndex):
    def __init__(self, connector: FakeConnector) -> None:
        self._connector = connector
        self._lookups: dict[str, int] = {}
        self._stored: set[bytes] = set(connector.store)

    def match(self, request: str, names: Sequence[bytes], cached: int) -> int | None:
        lookups = self._lookups.get(request, 0)
        self._lookups[request] = lookups + 1
        if self._connector.hesitates(request, lookups):
            return None
        stored = [name in self._stored for name in names]
        return stored.index(False) if False in stored else len(stored)

    def store(self, names: Sequence[bytes]) -> None:
        self._stored.update(names)


class _Mover(KVMover):
    """Loads fill their blocks with garbage until they end; saves read their blocks when they
    end.
    """

    def __init__(self, connector: FakeConnector) -> None:
        self._connector = connector
        self._caches: Mapping[int, Sequence[torch.Tensor]] = {}
        self._open: list[tuple[int, bool, BlockTransfer]] = []

    def open(
        self, caches: Mapping[int, Sequence[torch.Tensor]], *, rank: int = 0, ranks: int = 1
    ) -> None:
        self._caches = caches

    def begin(self, plan: TransferPlan) -> None:
        for load, transfers in ((True, plan.loads), (False, plan.saves)):
            for transfer in transfers:
                if not load and any(0 in blocks for blocks in transfer.blocks):
                    raise EngineError(f"transfer {transfer.id} includes the null block")
                if load:
                    self._put(transfer, None)
                self._open.append((self._connector.delay(transfer.id), load, transfer))

    def ended(self) -> TransferResult:
        done, failed, unfinished = [], [], []
        for delay, load, transfer in self._open:
            if delay:
                unfinished.append((delay - 1, load, transfer))
            elif self._connector.fails(transfer.id):
                failed.append((transfer.id, "on purpose"))
            else:
                self._move(load, transfer)
                done.append(transfer.id)
        self._open = unfinished
        return TransferResult(tuple(done), tuple(failed))

    def _move(self, load: bool, transfer: BlockTransfer) -> None:
        store = self._connector.store
        if load:
            self._put(transfer, [store[name] for name in transfer.names])
            return
        for i, name in enumerate(transfer.names):
            store[name] = tuple(
                tuple(cache[transfer.blocks[group][i]].clone() for cache in caches)
                for group, caches in self._caches.items()
            )

    def _put(self, transfer: BlockTransfer, content: list[Blocks] | None) -> None:
        for group, caches in self._caches.items():
            for i, block in enumerate(transfer.blocks[group]):
                for index, cache in enumerate(caches if block else ()):
                    cache[block] = -7 if content is None else content[i][group][index]
