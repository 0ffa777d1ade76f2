"""A KV connector made of others: blocks are saved in all, and loaded from the first that has them.

Named and configured like vLLM's `MultiConnector`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

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
from modulm.errors import ConfigError
from modulm.plugins import manager
from modulm_kv_transfer.choice import driver_name
from modulm_kv_transfer.remote import RemoteConnector

__all__ = ["MultiConnector", "MultiOptions"]

_FLAG = "kv_transfer_config"


@frozen
class MultiOptions:
    """connectors: for each tier, fastest first, a table with `kv_connector` and
    `kv_connector_extra_config`, as in `--kv-transfer-config`.
    """

    connectors: tuple[Mapping[str, Any], ...]


class _Index(KVIndex):
    """Asks the indexes of all tiers."""

    def __init__(self, tiers: Sequence[KVIndex]) -> None:
        self._tiers = tiers
        self.durable = any(tier.durable for tier in tiers)  # type: ignore[misc]

    def match(self, request: str, names: Sequence[bytes], cached: int) -> int | None:
        counts = [tier.match(request, names, cached) for tier in self._tiers]
        known = [count for count in counts if count is not None]
        return max(known) if len(known) == len(counts) else None

    def store(self, names: Sequence[bytes]) -> None:
        for tier in self._tiers:
            tier.store(names)

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._tiers[name[0]].remove([name[1:]])  # see `_Mover.ended`

    def blocks_to_save(self, request: str, names: Sequence[bytes]) -> int:
        return max(tier.blocks_to_save(request, names) for tier in self._tiers)

    def finish(self, request: str) -> None:
        for tier in self._tiers:
            tier.finish(request)


@define
class _Running:
    """A transfer. tiers: those that it still waits for; a load waits for one at a time."""

    transfer: BlockTransfer
    tiers: set[int]
    is_load: bool
    faults: list[str] = field(factory=list)


class _Mover(KVMover):
    """Passes saves to the movers of all tiers, and each load to one after the other until one has
    the blocks.
    """

    def __init__(self, names: Sequence[str], tiers: Sequence[KVMover]) -> None:
        self._names, self._tiers = names, tiers
        self._running: dict[int, _Running] = {}

    def open(
        self, caches: Mapping[int, Sequence[torch.Tensor]], *, rank: int = 0, ranks: int = 1
    ) -> None:
        for tier in self._tiers:
            tier.open(caches, rank=rank, ranks=ranks)

    def begin(self, plan: TransferPlan) -> None:
        everywhere = range(len(self._tiers))
        for save in plan.saves:
            self._running[save.id] = _Running(save, set(everywhere), is_load=False)
        for load in plan.loads:
            self._running[load.id] = _Running(load, {0}, is_load=True)
        for tier in everywhere:
            loads = plan.loads if tier == 0 else ()
            if loads or plan.saves or plan.holds:
                self._tiers[tier].begin(TransferPlan(loads, plan.saves, plan.holds))

    def ended(self) -> TransferResult:
        """Return the transfers that ended. Removed names begin with a byte that tells the tier."""
        done: list[int] = []
        failed: list[tuple[int, str]] = []
        removed: list[bytes] = []
        for tier, mover in enumerate(self._tiers):
            result = mover.ended()
            removed += [bytes([tier]) + name for name in result.removed]
            for identity in result.done:
                self._note(identity, tier, None, done, failed)
            for identity, reason in result.failed:
                self._note(identity, tier, f"{self._names[tier]}: {reason}", done, failed)
        return TransferResult(tuple(done), tuple(failed), tuple(removed))

    def _note(
        self,
        identity: int,
        tier: int,
        fault: str | None,
        done: list[int],
        failed: list[tuple[int, str]],
    ) -> None:
        """Record the end of a tier's part of a transfer; start the next part of a load."""
        running = self._running[identity]
        running.tiers.discard(tier)
        if fault is not None:
            running.faults.append(fault)
            if running.is_load and tier + 1 < len(self._tiers):
                running.tiers.add(tier + 1)
                self._tiers[tier + 1].begin(TransferPlan(loads=(running.transfer,)))
        if running.tiers:
            return
        del self._running[identity]
        if fault is None and (running.is_load or not running.faults):
            done.append(identity)
        else:
            failed.append((identity, "; ".join(running.faults)))

    def wait(self, seconds: float) -> None:
        """Block until a transfer of the first busy tier has ended, at most `seconds`."""
        busy = {tier for running in self._running.values() for tier in running.tiers}
        if busy:
            self._tiers[min(busy)].wait(seconds)

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()


class MultiConnector(KVConnector):
    """Combines connectors of one engine, such as host memory before files."""

    name: ClassVar[str] = "multi"
    api: ClassVar[int | tuple[int, int]] = 3
    Config: ClassVar[type] = MultiOptions

    config: MultiOptions

    def __init__(self, config: MultiOptions) -> None:
        """Raises ConfigError naming the table that is wrong."""
        super().__init__(config)
        if not config.connectors:
            raise ConfigError(_FLAG, "connectors: must have at least one table")
        self._tiers = [_tier(i, table) for i, table in enumerate(config.connectors)]

    def bind(self, model: str, ranks: int) -> None:
        for tier in self._tiers:
            tier.bind(model, ranks)

    def limit_holds(self, share: float, per_key: float) -> None:
        for tier in self._tiers:
            tier.limit_holds(share, per_key)

    def index(self) -> KVIndex:
        return _Index([tier.index() for tier in self._tiers])

    def mover(self) -> KVMover:
        return _Mover([tier.name for tier in self._tiers], [tier.mover() for tier in self._tiers])


def _tier(number: int, table: Mapping[str, Any]) -> KVConnector:
    """Build the connector of one table. Raises ConfigError."""
    path = f"connectors[{number}]"
    unknown = sorted(table.keys() - {"kv_connector", "kv_connector_extra_config", "kv_role"})
    if unknown:
        raise ConfigError(_FLAG, f"{path}: {unknown[0]} is unknown")
    if not isinstance(table.get("kv_connector"), str):
        raise ConfigError(_FLAG, f"{path}: kv_connector: must be the name of a connector")
    if table.get("kv_role", "kv_both") != "kv_both":
        raise ConfigError(_FLAG, f"{path}: kv_role: tiers of one engine are kv_both")
    plugins = manager.current()
    name = driver_name(table["kv_connector"])
    driver = plugins.load("kv_connectors", name)
    if issubclass(driver, MultiConnector | RemoteConnector):
        raise ConfigError(
            _FLAG,
            f"{path}: {name} cannot be combined with others: name tiers such as host and disk, or "
            f"{name} alone",
        )
    connector: KVConnector = driver(
        plugins.options("kv_connectors", name, table.get("kv_connector_extra_config", {}))
    )
    return connector
