"""Run workers as actors of a Ray cluster, one device each, on one or several machines."""

from __future__ import annotations

import hmac
import logging
import secrets
import shutil
import socket
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ray
from attrs import evolve
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from modulm.config.environ import variables
from modulm.config.resolve import choose_platform
from modulm.errors import ConfigError, EngineDead, EngineError
from modulm.plugins import manager
from modulm_distributed.executor import WorkersExecutor
from modulm_distributed.flags import DistributedConfig
from modulm_distributed.hosts import HostPlatform
from modulm_distributed.mesh import RankSpec
from modulm_distributed.stream import FrameStream
from modulm_distributed.tls import TlsSession, tls_contexts
from modulm_executor_ray.actor import Rank, versions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from modulm.contracts.config import EngineConfig

__all__ = ["RayExecutor", "hosts_of"]

log = logging.getLogger("modulm.engine")

#: Bytes of the secret that ranks authenticate themselves with.
_SECRET_BYTES = 32
#: Seconds for a new connection to announce its rank.
_GREETING_TIMEOUT = 10.0
#: Ray's resource names of platforms' devices; by default the platform's name.
_DEVICES: Mapping[str, str] = {"cpu": "", "cuda": "GPU", "rocm": "GPU", "xpu": "GPU"}


class RayExecutor(WorkersExecutor):
    """One actor for each rank. Ray places them on as few machines as possible."""

    name: ClassVar[str] = "ray"
    api: ClassVar[int | tuple[int, int]] = 3

    def __init__(self) -> None:
        super().__init__()
        self._actors: list[Any] = []
        self._serving: list[Any] = []
        self._hosts: list[str] = []
        self._group: Any = None
        self._folder: str | None = None
        self._own_cluster = False
        #: Whether each actor drives all devices of its machine.
        self._joined = False

    def connect(self, config: EngineConfig) -> Sequence[tuple[FrameStream, RankSpec]]:
        seconds = config.group(DistributedConfig).distributed_timeout_seconds
        self._join_cluster()
        self._start_actors(config, seconds)
        locations: list[Mapping[str, Any]] = ray.get([a.where.remote() for a in self._actors])
        self._hosts = [f"{one['address']} (process {one['pid']})" for one in locations]
        _check_versions(locations)
        nodes = [one["node"] for one in locations]
        first = locations[0]["address"]
        port = ray.get(self._actors[0].free_port.remote(first))
        if self._joined:
            specs = RankSpec.all_hosts(len(nodes), f"{first}:{port}", seconds=seconds)
        else:
            specs = RankSpec.all_ranks(
                config.parallel, f"tcp:{first}:{port}", seconds=seconds, hosts=len(set(nodes))
            )
        here = ray.get_runtime_context().get_node_id()
        streams = self._accept_ranks([node == here for node in nodes], seconds)
        slots = _host_slots(nodes, visible=self._device != "")
        placed = [
            evolve(spec, host_slot=slot, address=one["address"])
            for spec, slot, one in zip(specs, slots, locations, strict=True)
        ]
        return list(zip(streams, placed, strict=True))

    def _join_cluster(self) -> None:
        """Join the cluster that RAY_ADDRESS names or that runs here, or start one.

        Raises EngineError if the cluster of RAY_ADDRESS does not answer.
        """
        if ray.is_initialized():
            return
        quiet = {"log_to_driver": False, "configure_logging": False, "namespace": "modulm"}
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError as error:
            if address := variables().get("RAY_ADDRESS"):
                raise EngineError(
                    f"RAY_ADDRESS names {address}, where no cluster responds: start it "
                    "(`ray start --head`), correct the variable, or unset it to use this machine"
                ) from error
            ray.init(include_dashboard=False, **quiet)
            self._own_cluster = True

    def _start_actors(self, config: EngineConfig, seconds: int) -> None:
        """Reserve resources for each rank, or for each machine if one worker drives all devices of
        it, and start its actor. Raises ConfigError, EngineError.
        """
        platform, _ = choose_platform(config, manager.current())
        self._device = _DEVICES.get(platform.name, platform.name.upper())
        self._joined = isinstance(platform, HostPlatform)
        ranks, devices, strategy = config.parallel.ranks, 1, "PACK"
        if self._joined:
            ranks, devices = hosts_of(ranks, _most_devices(self._device), self._device)
            strategy = "STRICT_SPREAD"
        bundle = {"CPU": 1.0} | ({self._device: float(devices)} if self._device else {})
        self._group = placement_group([bundle] * ranks, strategy=strategy)
        if not self._group.wait(seconds):
            resources = ", ".join(f"{count:g} {name}" for name, count in bundle.items())
            has = ray.cluster_resources()
            raise EngineError(
                f"Ray has no resources for {ranks} ranks of {resources} each within {seconds} "
                "s: the "
                f"cluster has {', '.join(f'{has.get(name, 0):g} {name}' for name in bundle)}"
            )
        actor_class = ray.remote(Rank)
        options = {"num_cpus": 1, "max_restarts": 0, "max_task_retries": 0}
        if self._device == "GPU":
            options["num_gpus"] = 1
        elif self._device:
            options["resources"] = {self._device: devices}
        for rank in range(ranks):
            at = PlacementGroupSchedulingStrategy(self._group, rank)
            self._actors.append(actor_class.options(**options, scheduling_strategy=at).remote())

    def _accept_ranks(self, local: Sequence[bool], seconds: int) -> list[FrameStream]:
        """Let each rank connect: through a Unix socket on this machine, otherwise over TLS.

        local: whether each rank is on this machine.
        """
        self._folder = tempfile.mkdtemp(prefix="modulm-ranks-")
        secret = secrets.token_bytes(_SECRET_BYTES)
        if not all(local):
            tls_contexts(secret)  # kept; a rank's greeting does not wait for it
        path = str(Path(self._folder) / "executor")
        streams: dict[int, FrameStream] = {}
        with socket.socket(socket.AF_UNIX) as near:
            near.bind(path)
            near.listen(len(local))
            with socket.create_server((ray.util.get_node_ip_address(), 0)) as far:
                host, port = far.getsockname()[:2]
                for rank, (actor, is_local) in enumerate(zip(self._actors, local, strict=True)):
                    address = path if is_local else f"{host}:{port}"
                    self._serving.append(actor.serve.remote(address, secret, rank))
                for server, count in ((near, sum(local)), (far, len(local) - sum(local))):
                    server.settimeout(1.0)
                    deadline = time.monotonic() + seconds
                    accepted = 0
                    while accepted < count:
                        accepted += self._accept_rank(server, secret, streams, deadline)
        return [streams[rank] for rank in range(len(local))]

    def _accept_rank(
        self, server: socket.socket, secret: bytes, streams: dict[int, FrameStream], deadline: float
    ) -> bool:
        """Accept a connection; returns whether it is a rank, which is added to `streams`.

        Raises EngineDead if a rank has ended, or at the deadline.
        """
        try:
            peer, _ = server.accept()
        except TimeoutError:
            ended, _ = ray.wait(self._serving, timeout=0)
            if ended or time.monotonic() > deadline:
                first = self._serving.index(ended[0]) if ended else 0
                reason = self.ending(first) if ended else "the ranks have not connected"
                raise EngineDead(f"worker {first}: {reason}") from None
            return False
        peer.settimeout(_GREETING_TIMEOUT)
        try:
            if peer.family == socket.AF_UNIX:
                stream = FrameStream(peer)
            else:
                session = TlsSession(tls_contexts(secret), server=True)
                session.handshake(peer)
                stream, secret = FrameStream(peer, session), b""
            _, rank, presented = stream.receive() or (None, None, b"")
            if not hmac.compare_digest(presented, secret) or rank not in range(len(self._serving)):
                raise ConnectionRefusedError("it does not know the secret")
            if rank in streams:
                raise ConnectionRefusedError(f"rank {rank} is already connected")
        except Exception as error:  # strangers may send anything
            log.warning("closed a connection that does not belong to a rank: %s", error)
            peer.close()
            return False
        peer.settimeout(None)
        streams[rank] = stream
        return True

    def at(self, rank: int) -> str:
        return f"worker {rank} on {self._hosts[rank]}" if self._hosts else super().at(rank)

    def ending(self, rank: int) -> str:
        if rank >= len(self._serving):
            return "it was not started"
        ended, _ = ray.wait([self._serving[rank]], timeout=1.0)
        if not ended:
            return "its connection was lost"
        try:
            ray.get(ended[0])
        except ray.exceptions.RayActorError:
            return "its process was killed, ran out of memory or crashed"
        except ray.exceptions.RayError as error:
            return f"it failed: {str(error).strip().splitlines()[-1]}"
        return "its process closed its connection"

    def end(self, seconds: float) -> None:
        if not ray.is_initialized():
            return
        if self._serving and seconds:
            with suppress(ray.exceptions.RayError):
                ray.wait(self._serving, num_returns=len(self._serving), timeout=seconds)
        for actor in self._actors:
            with suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor)
        self._actors = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        super().stop()
        if self._own_cluster:
            self._own_cluster = False
            ray.shutdown()


def hosts_of(devices: int, most: int, name: str) -> tuple[int, int]:
    """Return the number of machines for `devices`, and the devices of each.

    most: devices of a machine. name: Ray's for them. Raises ConfigError if they are not divided
    evenly, or if no machine has any.
    """
    if most == 0:
        raise ConfigError("distributed_executor_backend", f"no machine of Ray's has {name}")
    if devices <= most:
        return 1, devices
    if devices % most:
        message = f"{devices} cannot be divided over machines with {most} {name} each"
        raise ConfigError("tensor_parallel_size", message)
    return devices // most, most


def _most_devices(name: str) -> int:
    """Return the most devices that a machine of the cluster has."""
    alive = (node["Resources"] for node in ray.nodes() if node["Alive"])
    return int(max((resources.get(name, 0) for resources in alive), default=0))


def _check_versions(locations: Sequence[Mapping[str, Any]]) -> None:
    """Raise EngineError if versions on a machine differ from this one's."""
    here = versions()
    for one in locations:
        differing = [name for name in here if one["versions"].get(name) != here[name]]
        if differing:
            there = ", ".join(f"{name} {one['versions'].get(name)}" for name in differing)
            ours = ", ".join(f"{name} {here[name]}" for name in differing)
            raise EngineError(f"{one['address']} has {there}; here it is {ours}")


def _host_slots(nodes: Sequence[str], *, visible: bool) -> list[tuple[int, int]]:
    """Return (index, count) of each rank among the ranks of its machine. visible: Ray shows each
    rank only its own device.
    """
    if visible:
        return [(0, 1)] * len(nodes)
    counts, seen = Counter(nodes), Counter[str]()
    slots = []
    for node in nodes:
        slots.append((seen[node], counts[node]))
        seen[node] += 1
    return slots
