"""KV connector: moves cache blocks to and from another place (group `modulm.kv_connectors`).

A connector has two halves. The index lives beside the scheduler and knows what is where; the mover
lives in each worker and moves. They talk through plain values that ride in plans and results, so
that the halves may be in different processes. Both work beside the steps: nothing waits for them
but the requests that asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

__all__ = [
    "API",
    "BlockTransfer",
    "KVConnector",
    "KVIndex",
    "KVMover",
    "TransferPlan",
    "TransferResult",
]

API = 3


@frozen
class BlockTransfer:
    """Blocks of one request to move. `id` comes back in a result when they are there.

    request: for messages. names: chained hashes of the blocks' tokens. blocks: for each cache
    group, the pool's block ids, in the order of `names`.
    """

    id: int
    request: str
    names: tuple[bytes, ...]
    blocks: tuple[tuple[int, ...], ...]


@frozen
class TransferPlan:
    """What to begin in a step: loads fill blocks, saves store them. The blocks of both stay as
    they are until the transfer has ended.
    """

    loads: tuple[BlockTransfer, ...] = ()
    saves: tuple[BlockTransfer, ...] = ()


@frozen
class TransferResult:
    """Transfers that ended on a rank since its last result: by id, those that worked, and those
    that did not, with a sentence. What a load should have filled that failed on any rank is
    computed instead. removed: names of blocks that this rank stores no longer.
    """

    done: tuple[int, ...] = ()
    failed: tuple[tuple[int, str], ...] = ()
    removed: tuple[bytes, ...] = ()


class KVIndex(ABC):
    """The scheduler's half. Called on the engine's thread: answers at once, never blocks.

    durable: blocks outlive the engine. Requests with an adapter, which is known by a name that may
    mean other weights later, are left out.
    """

    durable: ClassVar[bool] = False

    @abstractmethod
    def match(self, request: str, names: Sequence[bytes], cached: int) -> int | None:
        """How many of the leading blocks, by name, are stored elsewhere; None: ask again later.

        cached: leading blocks that are on the device already.
        """

    def store(self, names: Sequence[bytes]) -> None:
        """A save has worked on all ranks: these blocks are stored."""

    def remove(self, names: Sequence[bytes]) -> None:
        """A rank stores these blocks no longer."""

    def blocks_to_save(self, request: str, names: Sequence[bytes]) -> int:
        """How many of a row's full blocks, from the first one, should be saved. Default: all."""
        return len(names)

    def finish(self, request: str) -> None:
        """The request has ended."""


class KVMover(ABC):
    """The worker's half. `begin` starts transfers and returns; `ended` says what has ended."""

    @abstractmethod
    def open(
        self, caches: Mapping[int, Sequence[torch.Tensor]], *, rank: int = 0, ranks: int = 1
    ) -> None:
        """The caches of this rank, by cache group: a tensor per layer, whose first dimension is the
        block. rank: of `ranks` that share the model, each of which moves its own part.
        """

    @abstractmethod
    def begin(self, plan: TransferPlan) -> None:
        """Start transfers. A save reads its blocks after all work launched so far."""

    @abstractmethod
    def ended(self) -> TransferResult:
        """Transfers that ended since the last call."""

    def wait(self, seconds: float) -> None:
        """No row runs: return once a transfer has ended, or after that long at the latest."""

    def close(self) -> None:
        """Nothing follows; transfers under way may be dropped."""


class KVConnector(ABC):
    """Makes both halves, each where it lives. `Config`: its options (attrs, frozen).

    A driver is in use where the configuration has a table for it:
    `--plugin-config '{"kv_connectors": {"NAME": {...}}}'`.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    Config: ClassVar[type]

    def __init__(self, config: object) -> None:
        self.config = config

    def bind(self, model: str, ranks: int) -> None:
        """Called once, first. model: a digest of the model and of all that its keys and values
        depend on besides tokens, equal in all processes and after a restart; ranks: that share it.
        """

    @abstractmethod
    def index(self) -> KVIndex:
        """The scheduler's half."""

    @abstractmethod
    def mover(self) -> KVMover:
        """The worker's half."""
