"""From a rank's number to its groups."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen
from torch._C import _distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from modulm.errors import EngineError, PluginError
from modulm.parallel import Mesh, ProcessGroup
from modulm_distributed.balance import BalancedExperts
from modulm_distributed.collectives import Members
from modulm_distributed.context import ContextMesh
from modulm_distributed.replica_experts import ReplicaExperts

if TYPE_CHECKING:
    from modulm.contracts.config.parallel import ParallelConfig
    from modulm.contracts.platform import Platform
    from modulm.parallel.mesh import SpreadExperts
    from modulm.plugins.manager import PluginManager
    from modulm_distributed.collectives import Collectives
    from modulm_distributed.eplb import EplbConfig

__all__ = ["Place", "open_mesh"]


@frozen
class Place:
    """Where a worker stands. rank: of tensor * pipeline; ranks of one stage follow one another.

    store: where all ranks find one another: "file:PATH"; "tcp:HOST:PORT", which rank 0 serves; or
    "launcher:PREFIX", names in the store of the program that has started the ranks. hosts: on how
    many machines the ranks are. seconds: how long they wait for another. layers: of each stage, if
    they are given. spread: whether a rank has whole experts. share: which part of its machine it
    has, of how many; None: as all ranks are on one. address: of its machine, for the others, where
    they are on several. context: how many neighbours share out cached tokens, `neighbours` of them
    at a time. replica: which of `replicas` this is whose ranks hold the experts between them, and
    find one another at the store `shared`.
    """

    rank: int
    tensor: int
    pipeline: int
    store: str
    hosts: int = 1
    seconds: float = 300.0
    layers: tuple[int, ...] = ()
    spread: bool = False
    share: tuple[int, int] | None = None
    address: str = ""
    context: int = 1
    neighbours: int = 1
    replica: int = 0
    replicas: int = 1
    shared: str = ""

    @classmethod
    def all(cls, parallel: ParallelConfig, store: str, **more: Any) -> list[Place]:
        """Those of all ranks of one replica."""
        sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        layers = parallel.pipeline_layer_partition
        more |= {"layers": layers, "spread": parallel.enable_expert_parallel}
        more["context"] = parallel.decode_context_parallel_size
        more["neighbours"] = parallel.cp_kv_cache_interleave_size
        if parallel.data_parallel_group is not None:
            more["replica"] = parallel.data_parallel_rank_local
            more["replicas"] = parallel.data_parallel_size
            more["shared"] = f"file:{Path(parallel.data_parallel_group) / 'ranks'}"
        return [cls(rank, *sizes, store, **more) for rank in range(parallel.ranks)]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.tensor * self.pipeline


def open_mesh(
    place: Place, platform: Platform, plugins: PluginManager, balance: EplbConfig | None = None
) -> Mesh:
    """Connect this rank with those it shares something with. balance: how experts that are spread
    move between ranks; None: they do not. Raises EngineError.
    """
    if place.ranks == 1 and place.replicas == 1:
        return Mesh()
    stage, share = divmod(place.rank, place.tensor)
    store = _store(place.store, place.ranks, place)

    def group(name: str, rank: int, size: int) -> ProcessGroup:
        if size == 1:
            return ProcessGroup()
        one_host = place.hosts == 1
        members = Members(name, rank, size, store, one_host, place.seconds, place.address)
        return _choose(platform, members, plugins).open(platform, members)

    world = group("world", place.rank, place.ranks)
    tensor = world if place.pipeline == 1 else group(f"tensor {stage}", share, place.tensor)
    pipeline = group(f"pipeline {share}", stage, place.pipeline)
    pipeline = evolve(pipeline, layers=tuple(place.layers))
    expert, data = tensor if place.spread else ProcessGroup(), ProcessGroup()
    spread: SpreadExperts | None = None if balance is None else BalancedExperts(expert, balance)
    if place.replicas > 1:
        store = _store(place.shared, place.ranks * place.replicas, place)
        first, size = place.replica * place.tensor, place.replicas * place.tensor
        expert = data = group(f"experts {stage}", first + share, size)
        if place.tensor > 1:
            data = group(f"replicas {stage} {share}", place.replica, place.replicas)
        expert = evolve(expert, flag="data_parallel_size with enable_expert_parallel")
        spread = ReplicaExperts(expert, data, platform.device)
    mesh = Mesh(
        tensor=tensor, pipeline=pipeline, data=data, expert=expert, world=world, spread=spread
    )
    if place.context == 1:
        return mesh
    context = tensor
    if place.context < place.tensor:
        among, part = divmod(share, place.context)
        context = group(f"context {stage} {among}", part, place.context)
    return ContextMesh.of(mesh, context, place.neighbours)


def _store(named: str, ranks: int, place: Place) -> c10d.Store:
    kind, _, where = named.partition(":")
    if kind == "file":
        return c10d.FileStore(where, ranks)
    if kind == "launcher":
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=place.seconds)))
        return c10d.PrefixStore(where, store)
    host, _, port = where.rpartition(":")
    return c10d.TCPStore(host, int(port), ranks, is_master=place.rank == 0)


def _choose(platform: Platform, members: Members, plugins: PluginManager) -> type[Collectives]:
    """The first of the platform's collectives that is there and can connect these ranks."""
    reasons = []
    for name in platform.collectives:
        try:
            found: type[Collectives] = plugins.load("collectives", name)
        except PluginError as error:
            reasons.append(str(error))
            continue
        reason = found.rejects(platform, members)
        if reason is None:
            return found
        reasons.append(f"{name}: {reason}")
    raise EngineError(f"nothing connects {members.size} ranks: {'; '.join(reasons)}")
