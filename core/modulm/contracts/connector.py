"""KV connector: moves cache blocks to and from storage (group `modulm.kv_connectors`).

A connector has two halves. The index, beside the scheduler, knows which blocks are stored; the
mover, in each worker, copies them. They exchange plain values in plans and results, so they may run
in different processes. Transfers run in the background; only the requests that need them wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

__all__ = [
    "API", "BlockHold", "BlockTransfer", "KVConnector", "KVIndex", "KVMover", "TransferPlan",
    "TransferResult",
]  # fmt: skip

API = 3


@frozen
class BlockTransfer:
    """Blocks of one request to move. The result returns `id` when the transfer has ended.

    request: request id, for messages. names: chained hashes of the blocks' tokens. blocks: for
    each cache group, block ids in the order of `names`; a load does not need those that are 0. If
    groups have blocks of several sizes, a name stands for as many tokens as are whole blocks in
    each, and a group with smaller blocks is listed once for each of them. source: for loads of a
    connector between engines, where the blocks are; a plain value.
    """

    id: int
    request: str
    names: tuple[bytes, ...]
    blocks: tuple[tuple[int, ...], ...]
    source: Any = None


@frozen
class BlockHold:
    """Stored blocks to keep from eviction until they have not been used for `seconds`.

    names: of a prefix, in its order. tenant, key: whose share of the store they count for.
    """

    names: tuple[bytes, ...]
    seconds: float
    tenant: str = ""
    key: str = ""


@frozen
class TransferPlan:
    """Transfers to start in a step: loads fill blocks, saves store them.

    The blocks are not reused until their transfer has ended. holds: apply once the saves of this
    plan and of earlier ones have ended; stores that do not evict may ignore them.
    """

    loads: tuple[BlockTransfer, ...] = ()
    saves: tuple[BlockTransfer, ...] = ()
    holds: tuple[BlockHold, ...] = ()


@frozen
class TransferResult:
    """Transfers that ended on a rank since its last result.

    done: ids of successful transfers. failed: ids of failed ones, with a message; tokens whose
    load failed on any rank are computed instead. removed: names of blocks that this rank no longer
    stores.
    """

    done: tuple[int, ...] = ()
    failed: tuple[tuple[int, str], ...] = ()
    removed: tuple[bytes, ...] = ()


class KVIndex(ABC):
    """The scheduler's half. Called on the engine's thread; must not block.

    durable: whether stored blocks outlive the engine. If so, requests with adapters are not
    stored, since an adapter's name may refer to other weights later. medium: where blocks come
    from, as a label of metrics: "host", "disk" or "p2p".
    """

    durable: ClassVar[bool] = False
    medium: ClassVar[str] = "external_unspecified"

    @abstractmethod
    def match(self, request: str, names: Sequence[bytes], cached: int) -> int | None:
        """Return how many leading blocks are stored, or None to be asked again later.

        cached: leading blocks that are already on the device.
        """

    def store(self, names: Sequence[bytes]) -> None:
        """Record blocks whose save has succeeded on all ranks."""

    def remove(self, names: Sequence[bytes]) -> None:
        """Remove blocks that a rank no longer stores."""

    def blocks_to_save(self, request: str, names: Sequence[bytes]) -> int:
        """Return how many of a row's leading full blocks to save. Default: all."""
        return len(names)

    def finish(self, request: str) -> None:
        """Called when the request has ended."""


class KVMover(ABC):
    """The worker's half. `begin` starts transfers and returns; `ended` returns completed ones."""

    @abstractmethod
    def open(
        self, caches: Mapping[int, Sequence[torch.Tensor]], *, rank: int = 0, ranks: int = 1
    ) -> None:
        """Receive this rank's caches.

        caches: tensors whose first dimension is the block, by index in `BlockTransfer.blocks`;
        indices of other pipeline stages are absent. rank: of the `ranks` that share the model; each
        moves its own shard.
        """

    @abstractmethod
    def begin(self, plan: TransferPlan) -> None:
        """Start transfers. A save reads its blocks after all work launched so far."""

    @abstractmethod
    def ended(self) -> TransferResult:
        """Return the transfers that ended since the last call."""

    def wait(self, seconds: float) -> None:
        """Block until a transfer has ended, at most `seconds`. Called when no row is running."""

    def close(self) -> None:
        """Release resources; running transfers may be dropped."""


class KVConnector(ABC):
    """Builds both halves, each in its process. `Config`: its options (attrs, frozen).

    A connector is enabled by a table in the configuration:
    `--plugin-config '{"kv_connectors": {"NAME": {...}}}'`.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    Config: ClassVar[type]

    def __init__(self, config: object) -> None:
        self.config = config

    def bind(self, model: str, ranks: int) -> None:
        """Called once, before anything else.

        model: a digest of everything besides tokens that keys and values depend on; it is the same
        in all processes and after a restart. ranks: how many ranks share the model.
        """

    def limit_holds(self, share: float, per_key: float) -> None:
        """Called once, after `bind`: the share of the store that `TransferPlan.holds` may keep, and
        the share of that for one key of a tenant.
        """

    @abstractmethod
    def index(self) -> KVIndex:
        """Build the scheduler's half."""

    @abstractmethod
    def mover(self) -> KVMover:
        """Build the worker's half."""
