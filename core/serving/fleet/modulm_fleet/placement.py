"""Which replicas run on which machine, and which front end serves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from modulm.errors import ConfigError
from modulm.plugins import manager
from modulm.plugins.index import to_install
from modulm_fleet.flags import FleetConfig

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig

__all__ = ["Placement", "placement"]


@frozen
class Placement:
    """Which replicas this machine runs and serves.

    here: ranks of the replicas on this machine. served: ranks that its front end sends requests to;
    empty without a front end. address: where replicas of other machines announce themselves.
    """

    here: range
    served: range
    address: tuple[str, int]

    @property
    def elsewhere(self) -> range:
        """Ranks that are served here and run on other machines."""
        return range(self.here.stop, self.served.stop)

    @property
    def headless(self) -> bool:
        """Whether this machine has no front end."""
        return not self.served

    @property
    def several(self) -> bool:
        """Whether the front end serves more than one replica."""
        return len(self.served) > 1


def placement(config: EngineConfig) -> Placement:
    """The placement that the flags describe. Raises ConfigError for contradictory flags."""
    fleet, parallel = config.group(FleetConfig), config.parallel
    size = parallel.data_parallel_size
    if fleet.prefill_replicas or fleet.decode_replicas:
        return _place_pools(config)
    if parallel.shared_experts:
        return _place_together(config)
    if fleet.data_parallel_backend == "ray":
        raise ConfigError("data_parallel_backend", "use modulm-ray-serve for replicas on Ray")
    address = fleet.data_parallel_address or fleet.master_addr, fleet.data_parallel_rpc_port
    if fleet.data_parallel_rank is not None or fleet.data_parallel_external_lb:
        only = _external_replica(fleet, size)
        return Placement(only, only, address)
    if fleet.nnodes > 1 and size == 1:
        raise ConfigError(
            "nnodes", "one model over several machines needs --distributed-executor-backend ray"
        )
    here = _local_replicas(fleet, parallel.data_parallel_size_local, size)
    if fleet.headless:
        if fleet.data_parallel_hybrid_lb:
            raise ConfigError(
                "headless", "with --data-parallel-hybrid-lb each machine has a front end"
            )
        if not here or here.start == 0:
            raise ConfigError(
                "headless",
                "replicas for another machine's front end need --data-parallel-start-rank and "
                "--data-parallel-size-local, both above 0",
            )
        return Placement(here, range(0), address)
    if fleet.data_parallel_hybrid_lb:
        return Placement(here, here, address)
    if here.start:
        raise ConfigError(
            "data_parallel_start_rank",
            "the machine with the front end has the first replicas: set --headless here, or "
            "--data-parallel-hybrid-lb on all",
        )
    return Placement(here, range(size), address)


def _place_pools(config: EngineConfig) -> Placement:
    """The placement of prefill and decode replicas: all on this machine, with one front end."""
    fleet, parallel = config.group(FleetConfig), config.parallel
    for name, other in (
        ("prefill_replicas", "--decode-replicas"), ("decode_replicas", "--prefill-replicas"),
    ):  # fmt: skip
        if not config.value(name):
            raise ConfigError(name, f"must be at least 1 beside {other}")
    contradictory = {
        "data_parallel_size": parallel.data_parallel_size != 1,
        "data_parallel_rank": fleet.data_parallel_rank is not None,
        "data_parallel_external_lb": fleet.data_parallel_external_lb,
        "data_parallel_hybrid_lb": fleet.data_parallel_hybrid_lb,
        "data_parallel_start_rank": bool(fleet.data_parallel_start_rank),
        "data_parallel_size_local": parallel.data_parallel_size_local is not None,
        "data_parallel_backend": fleet.data_parallel_backend != "mp",
        "headless": fleet.headless,
        "nnodes": fleet.nnodes > 1,
    }
    for name, is_set in contradictory.items():
        if is_set:
            raise ConfigError(
                name,
                "--prefill-replicas and --decode-replicas are replicas of this machine: leave it "
                "out, or start servers with --kv-transfer-config and put a proxy in front of them",
            )
    if "peer" not in {each.name for each in manager.current().names("kv_connectors")}:
        message = f"needs modulm-kv-peer{to_install('modulm-kv-peer')}"
        raise ConfigError("prefill_replicas", message)
    size = fleet.prefill_replicas + fleet.decode_replicas
    address = fleet.data_parallel_address or fleet.master_addr, fleet.data_parallel_rpc_port
    return Placement(range(size), range(size), address)


def _place_together(config: EngineConfig) -> Placement:
    """The placement of replicas that share experts: all on this machine, with one front end."""
    fleet, parallel = config.group(FleetConfig), config.parallel
    size = parallel.data_parallel_size
    elsewhere = {
        "data_parallel_rank": fleet.data_parallel_rank is not None,
        "data_parallel_external_lb": fleet.data_parallel_external_lb,
        "data_parallel_hybrid_lb": fleet.data_parallel_hybrid_lb,
        "data_parallel_start_rank": bool(fleet.data_parallel_start_rank),
        "data_parallel_size_local": parallel.data_parallel_size_local not in (None, size),
        "data_parallel_backend": fleet.data_parallel_backend != "mp",
        "headless": fleet.headless,
        "nnodes": fleet.nnodes > 1,
        "distributed_executor_backend": parallel.distributed_executor_backend not in (None, "mp"),
    }
    for name, is_set in elsewhere.items():
        if is_set:
            raise ConfigError(
                name,
                "--enable-expert-parallel spreads experts over replicas of one machine, with the "
                "executor mp: leave one of the two out, or use --tensor-parallel-size, whose ranks "
                "may be anywhere (--distributed-executor-backend ray)",
            )
    absent = {
        "enable_sleep_mode": config.model.enable_sleep_mode,
        "batch_invariant": config.model.batch_invariant,
    }
    for name, is_set in absent.items():
        if is_set:
            raise ConfigError(
                name,
                "not supported yet where replicas share experts (--data-parallel-size with "
                "--enable-expert-parallel)",
            )
    address = fleet.data_parallel_address or fleet.master_addr, fleet.data_parallel_rpc_port
    return Placement(range(size), range(size), address)


def _external_replica(fleet: FleetConfig, size: int) -> range:
    """The single replica of a front end behind an external load balancer."""
    rank = fleet.data_parallel_rank
    if rank is None:
        raise ConfigError("data_parallel_external_lb", "needs --data-parallel-rank")
    if rank >= size:
        raise ConfigError("data_parallel_rank", f"{rank} of --data-parallel-size {size}")
    if fleet.headless or fleet.data_parallel_hybrid_lb:
        raise ConfigError("data_parallel_rank", "is for one replica with a front end of its own")
    return range(rank, rank + 1)


def _local_replicas(fleet: FleetConfig, local: int | None, size: int) -> range:
    """Ranks of the replicas on this machine."""
    if fleet.node_rank >= fleet.nnodes:
        raise ConfigError("node_rank", f"{fleet.node_rank} of --nnodes {fleet.nnodes}")
    count = -(-size // fleet.nnodes) if local is None else local
    start = fleet.data_parallel_start_rank
    first = fleet.node_rank * count if start is None else start
    if local is None and start is not None:
        count = size - first
    last = min(first + count, size) if local is None else first + count
    if first >= size or last > size:
        raise ConfigError(
            "data_parallel_start_rank",
            f"{count} replicas from {first} on are not in --data-parallel-size {size}",
        )
    return range(first, last)
