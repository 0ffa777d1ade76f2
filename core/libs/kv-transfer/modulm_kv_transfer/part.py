"""Step part of KV connectors (`modulm.kv_connectors`): transfers blocks in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import attrs

from modulm.contracts.connector import (
    BlockHold,
    BlockTransfer,
    KVConnector,
    TransferPlan,
    TransferResult,
)
from modulm.contracts.decision import Decision
from modulm.contracts.step_part import BuiltModel, PlannerContext, StepPart
from modulm.errors import ConfigError
from modulm_kv_transfer.choice import connector_decision, connector_tables
from modulm_kv_transfer.flags import KVTransferConfig
from modulm_kv_transfer.identity import engine_facts, model_digest
from modulm_kv_transfer.remote import LayeredPlan, RemoteConnector, RemoteIndex
from modulm_prefix_retention.flags import PrefixRetentionConfig

if TYPE_CHECKING:
    from modulm_kv_transfer.planner import TransferPlanner
    from modulm_kv_transfer.runner import TransferRunner

__all__ = ["TransfersPart"]


class TransfersPart(StepPart):
    """Step part of KV connectors; on if flags or `--plugin-config` name one."""

    name = "transfers"
    api = 1
    all_ranks = True

    def __init__(
        self,
        connector: KVConnector,
        decision: Decision | None = None,
        *,
        late: bool = False,
        calculated: bool = False,
    ) -> None:
        """late: see `TransferPlanner`. calculated: whether the engine calculates scales of its
        cache, so that other engines cannot read it.
        """
        self.connector, self._decision, self._late = connector, decision, late
        self._calculated = calculated

    @classmethod
    def opened(cls, config: Any, plugins: Any) -> Self | None:
        configured = plugins.configured("kv_connectors", connector_tables(config))
        if configured is None:
            return None
        driver, options = configured
        connector = driver(options)
        connector.bind(model_digest(config, plugins), config.parallel.ranks)
        retention = config.group(PrefixRetentionConfig)
        connector.limit_holds(retention.prefix_retention, retention.prefix_retention_per_key)
        if isinstance(connector, RemoteConnector):
            replica = config.parallel.data_parallel_rank_local
            connector.describe_engine(engine_facts(config, plugins), replica)
        late = config.group(KVTransferConfig).kv_offloading_policy == "evicted"
        decision = connector_decision(config, connector)
        return cls(connector, decision, late=late, calculated=config.cache.calculate_kv_scales)

    def decision(self) -> Decision | None:
        return self._decision

    def planner(self, context: PlannerContext) -> TransferPlanner:
        from modulm_kv_transfer.planner import TransferPlanner
        from modulm_kv_transfer.remote_planner import RemoteTransferPlanner

        index = self.connector.index()
        if index.durable and self._calculated:
            raise ConfigError(
                "calculate_kv_scales",
                f"the connector {self.connector.name} shares blocks with other engines, which "
                "calculate other scales: store scales in the checkpoint, use --kv-cache-dtype "
                "fp8_per_token_head, or keep blocks in host memory only (--kv-offloading-size)",
            )
        if isinstance(index, RemoteIndex):
            return RemoteTransferPlanner(index, context)
        return TransferPlanner(index, context, late=self._late)

    def runner(self, built: BuiltModel) -> TransferRunner:
        from modulm_kv_transfer.layers import LayeredMover
        from modulm_kv_transfer.runner import LayeredTransferRunner, TransferRunner

        _check_groups(built.loaded)
        mover, queued = self.connector.mover(), built.platform.queued
        if isinstance(mover, LayeredMover):
            return LayeredTransferRunner(mover, queued=queued)
        remote = isinstance(self.connector, RemoteConnector)
        return TransferRunner(mover, remote=remote, queued=queued)

    def pack_plan(self, value: TransferPlan) -> list[Any]:
        lists = (value.loads, value.saves, value.holds)
        packed: list[Any] = [[attrs.astuple(each) for each in values] for values in lists]
        if isinstance(value, LayeredPlan):
            computing = [attrs.astuple(each) for each in value.computing]
            packed += [computing, value.committed, value.dropped]
        return packed

    def unpack_plan(self, packed: list[Any]) -> TransferPlan:
        loads, saves, holds, *layered = packed
        kept = tuple(BlockHold(tuple(names), *rest) for names, *rest in holds)
        common = tuple(map(_transfer, loads)), tuple(map(_transfer, saves)), kept
        if not layered:
            return TransferPlan(*common)
        computing, committed, dropped = layered
        return LayeredPlan(
            *common, tuple(map(_transfer, computing)), tuple(committed), tuple(dropped)
        )

    def pack_report(self, value: TransferResult) -> list[Any]:
        return [value.done, value.failed, value.removed]

    def unpack_report(self, packed: list[Any]) -> TransferResult:
        done, failed, removed = packed
        return TransferResult(tuple(done), tuple(map(tuple, failed)), tuple(removed))


def _check_groups(loaded: Any) -> None:
    """Raise ConfigError if not all of a model's cache groups have blocks that prompts share."""
    for group in loaded.groups:
        if group.kind == "cross":
            message = "a KV connector cannot store encoder outputs of encoder-decoder models"
            raise ConfigError("kv_transfer_config", message)
        if group.kind == "state" and group.block_size >= loaded.max_model_len:
            raise ConfigError(
                "kv_transfer_config",
                "layers keep one state per sequence: a KV connector needs --mamba-cache-mode all, "
                "with which states of prompts' beginnings are kept",
            )


def _transfer(packed: list[Any]) -> BlockTransfer:
    number, request, names, blocks, source = packed
    return BlockTransfer(number, request, tuple(names), tuple(map(tuple, blocks)), source)
