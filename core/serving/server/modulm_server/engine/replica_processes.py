"""The addresses of replicas, and the processes of this machine's."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain
from typing import TYPE_CHECKING, Any

import attrs
from attrs import define, evolve, field, frozen

from modulm.errors import ConfigError, EngineStalled
from modulm_fleet.flags import FleetConfig
from modulm_fleet.pools import PoolRouter, pool_flags
from modulm_fleet.router import Router
from modulm_server.engine.client import ReplicaHealth
from modulm_server.engine.core_client import WorkerCall
from modulm_server.engine.engine_calls import call_all, of_replica, then
from modulm_server.engine.process_client import ProcessCoreClient
from modulm_server.engine.spawn import EngineProcess
from modulm_server.flags import ServerConfig
from modulm_weight_transfer.engine import WeightState

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.engine_info import EngineInfo
    from modulm.plugins.manager import PluginManager
    from modulm_fleet.placement import Placement
    from modulm_server.engine.adapters import Adapter

__all__ = [
    "Address",
    "Replica",
    "call_workers",
    "check_alike",
    "close_all",
    "common_weights",
    "listening",
    "make_router",
    "replica_config",
    "run_weights",
    "start_again",
    "trouble_of",
]

#: Failed starts in a row, and deaths soon after a start, after which a replica is given up.
_STARTS = 5
#: Fields of `EngineInfo` that all replicas must share.
_ALIKE = ("models", "architecture", "vocabulary", "max_model_len", "dtype", "tasks")


@frozen
class Address:
    """Where a replica listens: a path, or HOST:PORT and the file with the shared secret."""

    rank: int
    where: str
    secret_file: str | None = None


@define(eq=False)
class Replica:
    """The state of a replica, as one front end knows it.

    start: starts its process, if this front end does so. ended: set when the connection of `client`
    has ended. draining: it gets no more requests, since it will be restarted. stalled: since when
    it does not respond (monotonic seconds). mute: its events are
    ignored, since its sequences were restarted elsewhere. due: when to start or reach it next.
    deaths, failed: recent deaths, and failed starts in a row. adapters: those it had when it died.
    """

    address: Address
    start: Callable[..., EngineProcess] | None
    client: ProcessCoreClient | None = None
    ended: threading.Event | None = None
    up: bool = False
    reason: str | None = None
    stalled: float | None = None
    mute: bool = False
    draining: bool = False
    starting: bool = False
    due: float | None = None
    since: float = field(factory=time.monotonic)
    deaths: int = 0
    failed: int = 0
    restarts: int = 0
    adapters: tuple[Adapter, ...] = ()

    @property
    def health(self) -> ReplicaHealth:
        status = "ok" if self.up else "starting" if self.starting else "dead"
        if self.draining:
            status = "draining"
        if self.stalled is not None:
            status = "stalled"
        reason = None if status == "ok" else self.reason
        return ReplicaHealth(self.address.rank, status, reason, self.restarts)

    @property
    def exhausted(self) -> bool:
        """Whether its process failed, or died soon after its start, too often."""
        return self.failed >= _STARTS or self.deaths > _STARTS


def replica_config(config: EngineConfig, index: int, count: int) -> EngineConfig:
    """The configuration of one of the `count` replicas of this machine."""
    parts = {"data_parallel_rank_local": index, "data_parallel_size_local": count}
    return config.with_parts({**parts, **pool_flags(config, index)})


def make_router(info: EngineInfo, replicas: int) -> Router:
    """Create the router of `replicas` replicas."""
    cache, servers = info.config.cache, info.config.group(ServerConfig).api_server_count
    caches_prefixes = cache.enable_prefix_caching is not False
    arguments = (
        replicas, info.block_size or 16,
        info.cache_tokens if caches_prefixes else 0,
        cache.prefix_caching_hash_algo, (servers or 1) > 1,
    )  # fmt: skip
    prefill = info.config.group(FleetConfig).prefill_replicas
    return PoolRouter(prefill, *arguments) if prefill else Router(*arguments)


def _all_clients(replicas: Sequence[Replica]) -> list[tuple[int, ProcessCoreClient]]:
    """The ranks and clients of all replicas. Raises EngineStalled if one is not up."""
    clients: list[tuple[int, ProcessCoreClient]] = []
    for replica in replicas:
        if not replica.up or replica.client is None:
            health = replica.health
            raise EngineStalled(f"replica {health.rank} is {health.status}; calls go to all")
        clients.append((replica.address.rank, replica.client))
    return clients


def call_workers(replicas: Sequence[Replica], call: WorkerCall) -> Future[list[Any]]:
    """Call the workers of all replicas; results are in order of the replicas.

    Raises EngineStalled if a replica takes no calls now, and the errors of clients.
    """
    clients = _all_clients(replicas)
    for _, client in clients:
        client.check_call(call)
    answers = call_all(clients, lambda one: of_replica(one[0], one[1].call_workers(call)))
    if answers is None:
        raise EngineStalled("no replica accepts requests")
    return then(answers, lambda each: list(chain.from_iterable(each)))


def run_weights(
    replicas: Sequence[Replica], operation: str, arguments: Mapping[str, Any]
) -> Future[dict[str, Any]]:
    """Run an operation of `EngineWeights` on all replicas: the state of one, `busy` and `checking`
    if any is.

    Raises EngineStalled as `call_workers` does.
    """
    clients = [client for _, client in _all_clients(replicas)]
    answers = call_all(clients, lambda client: client.run_weights(operation, arguments))
    if answers is None:
        raise EngineStalled("no replica accepts requests")
    return then(
        answers,
        lambda states: {
            **states[0],
            **{key: any(state[key] for state in states) for key in ("busy", "checking")},
        },
    )


def close_all(replicas: Sequence[Replica]) -> None:
    """Close the clients of all replicas at the same time."""
    clients = [replica.client for replica in replicas if replica.client is not None]
    ending = [threading.Thread(target=client.close) for client in clients]
    for thread in ending:
        thread.start()
    for thread in ending:
        thread.join()


def trouble_of(replicas: Sequence[Replica]) -> str | None:
    """Why no replica works, if at least one has stalled and none works."""
    if any(replica.up for replica in replicas):
        return None
    return next((replica.reason for replica in replicas if replica.stalled is not None), None)


def common_weights(
    replicas: Sequence[Replica], before: WeightState, joining: ProcessCoreClient | None = None
) -> WeightState:
    """The common weight state of the running replicas. before: the one so far.

    A restarted replica has the checkpoint's weights. If the others have newer ones, or it had them
    itself, the state is broken until the next update.
    """
    clients = [replica.client for replica in replicas if replica.up and replica.client is not None]
    states = [client.weights for client in (*clients, joining) if client is not None]
    if not states:
        return before
    if joining is not None and not clients:
        states.append(before)  # all were restarted
    last = max(states, key=lambda state: state.weight_version)
    broken = next((state.broken for state in states if state.broken is not None), None)
    updating = any(state.updating for state in states)
    if broken is None and not updating and len({s.weight_version for s in states}) > 1:
        broken = (
            "replicas have weights of different versions, because one was restarted: send a "
            "complete update"
        )
    version = last.weight_version
    if version < before.weight_version and (before.broken is not None or before.updating):
        version = before.weight_version  # no replica has this version any more
        broken = broken or (None if updating else before.broken)
    return evolve(last, updating=updating, broken=broken, weight_version=version)


def listening(placed: Placement, host: str) -> list[socket.socket]:
    """Create listening sockets for this machine's replicas, at the ports that front ends of other
    machines connect to. Raises ConfigError.
    """
    listeners: list[socket.socket] = []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for rank in placed.here:
        port = placed.address[1] + 1 + rank
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(64)
        except OSError as error:
            for one in listeners:
                one.close()
            raise ConfigError(
                "data_parallel_rpc_port",
                f"{host}:{port} cannot be listened on: {error.strerror}",
            ) from error
    return listeners


def start_again(
    address: Address,
    listener: socket.socket | None,
    config: EngineConfig,
    plugins: PluginManager,
    **parts: str,
) -> EngineProcess:
    """Start a process that replaces a dead one. parts: changes to its configuration."""
    process = EngineProcess(address.where, listener, address.secret_file)
    try:
        process.start(config.with_parts(parts), plugins)
    except BaseException:
        process.kill()
        process.close()
        raise
    return process


def check_alike(one: EngineInfo, other: EngineInfo, rank: int) -> None:
    """Raise ConfigError for a replica that would answer differently from the others."""
    ours, theirs = _compared(one), _compared(other)
    for name, value in ours.items():
        if value != theirs[name]:
            raise ConfigError(
                "data_parallel_size",
                f"replica {rank} has {name} {theirs[name]!r}, the first {value!r}",
            )


def _compared(info: EngineInfo) -> dict[str, Any]:
    fields = attrs.asdict(info, recurse=False)
    shared = {name: fields[name] for name in _ALIKE}
    return {**shared, "adapters": info.limit("adapters", "slots")}
