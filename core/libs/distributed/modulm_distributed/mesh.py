"""The groups that a rank belongs to, and how it connects to them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen
from torch._C import _distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from modulm.errors import EngineError
from modulm.parallel import Mesh, ProcessGroup
from modulm_distributed.balance import BalancedExperts
from modulm_distributed.choice import choose_collectives
from modulm_distributed.collectives import Members
from modulm_distributed.context import ContextMesh
from modulm_distributed.hosts import HostPlatform
from modulm_distributed.replica_experts import ReplicaExperts

if TYPE_CHECKING:
    from torch import Tensor

    from modulm.contracts.config.parallel import ParallelConfig
    from modulm.contracts.platform import Platform
    from modulm.parallel.mesh import SpreadExperts
    from modulm.plugins.manager import PluginManager
    from modulm_distributed.eplb import EplbConfig

__all__ = ["PlannedGroup", "RankSpec", "open_mesh", "planned_mesh"]


@frozen
class RankSpec:
    """A worker's rank, and how it reaches the others.

    rank: of tensor * pipeline; ranks of one stage are consecutive. tensor, pipeline: sizes. store:
    where all ranks meet: "file:PATH"; "tcp:HOST:PORT", served by rank 0; or "launcher:PREFIX",
    names in the store of the program that started the ranks. hosts: number of machines. seconds:
    how long ranks wait for one another. layers: of each stage; empty: split automatically.
    expert_parallel: ranks hold whole experts (`--enable-expert-parallel`). host_slot: (index,
    count) among the workers that share this machine; None: all ranks do. address: of this machine,
    for ranks on others. context: ranks that share the cached tokens of a sequence
    (`--decode-context-parallel-size`), interleave_tokens at a time
    (`--cp-kv-cache-interleave-size`). replica: index among `replicas` whose ranks share experts,
    and meet at `replica_store`. joined: number of machines with one worker each, whose platform is
    a `HostPlatform`: `rank` is the machine, tensor and pipeline are 1; 0: a worker for each rank.
    """

    rank: int
    tensor: int
    pipeline: int
    store: str
    hosts: int = 1
    seconds: float = 300.0
    layers: tuple[int, ...] = ()
    expert_parallel: bool = False
    host_slot: tuple[int, int] | None = None
    address: str = ""
    context: int = 1
    interleave_tokens: int = 1
    replica: int = 0
    replicas: int = 1
    replica_store: str = ""
    joined: int = 0

    @classmethod
    def all_ranks(cls, parallel: ParallelConfig, store: str, **more: Any) -> list[RankSpec]:
        """Build the specs of all ranks of one replica."""
        sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        layers = parallel.pipeline_layer_partition
        more |= {"layers": layers, "expert_parallel": parallel.enable_expert_parallel}
        more["context"] = parallel.decode_context_parallel_size
        more["interleave_tokens"] = parallel.cp_kv_cache_interleave_size
        if parallel.data_parallel_group is not None:
            more["replica"] = parallel.data_parallel_rank_local
            more["replicas"] = parallel.data_parallel_size
            more["replica_store"] = f"file:{Path(parallel.data_parallel_group) / 'ranks'}"
        return [cls(rank, *sizes, store, **more) for rank in range(parallel.ranks)]

    @classmethod
    def all_hosts(cls, hosts: int, address: str, **more: Any) -> list[RankSpec]:
        """Build the specs of the workers of `hosts` machines. address: HOST:PORT of the first."""
        store = f"tcp:{address}"
        return [cls(host, 1, 1, store, hosts, joined=hosts, **more) for host in range(hosts)]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline

    @property
    def repeats(self) -> bool:
        """Whether the worker repeats what that of the first machine does, and returns nothing."""
        return self.joined > 0 and self.rank > 0


class PlannedGroup(ProcessGroup):
    """A rank without connections. Its collectives allocate what connected ranks would, and return
    zeros.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else torch.zeros_like(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else x.new_zeros(*x.shape[:-1], x.shape[-1] * self.size)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.all_reduce(x).tensor_split(self.size)[self.rank]


def planned_mesh(spec: RankSpec) -> Mesh:
    """Return the groups of a rank without connections, to plan what it would hold."""
    stage, share = divmod(spec.rank, spec.tensor)
    tensor = PlannedGroup(share, spec.tensor)
    pipeline = ProcessGroup(stage, spec.pipeline, layers=tuple(spec.layers))
    expert = tensor if spec.expert_parallel else ProcessGroup()
    if spec.replicas > 1:
        expert = PlannedGroup(spec.replica * spec.tensor + share, spec.replicas * spec.tensor)
    world = PlannedGroup(spec.rank, spec.ranks)
    mesh = Mesh(tensor=tensor, pipeline=pipeline, expert=expert, world=world)
    if spec.context == 1:
        return mesh
    context = ProcessGroup(share % spec.context, spec.context)
    return ContextMesh.of(mesh, context, spec.interleave_tokens)


def open_mesh(
    spec: RankSpec,
    platform: Platform,
    plugins: PluginManager,
    balance: EplbConfig | None = None,
    *,
    custom_sums: bool = True,
) -> Mesh:
    """Connect this rank with the ranks of its groups. Raises EngineError.

    balance: how experts are moved between ranks; None: never. custom_sums: whether collectives may
    sum with kernels of their own.
    """
    if spec.joined:
        if not isinstance(platform, HostPlatform):
            raise EngineError(f"platform {platform.name} cannot join several machines")
        platform.join_hosts(spec.store.removeprefix("tcp:"), spec.joined, spec.rank)
    if spec.ranks == 1 and spec.replicas == 1:
        return Mesh()
    stage, share = divmod(spec.rank, spec.tensor)
    store = _store(spec.store, spec.ranks, spec)

    def group(name: str, rank: int, size: int) -> ProcessGroup:
        if size == 1:
            return ProcessGroup()
        one_host = spec.hosts == 1
        members = Members(name, rank, size, store, one_host, spec.seconds, spec.address)
        chosen = choose_collectives(platform, members, plugins, custom=custom_sums)
        if chosen.driver is None:
            reasons = "; ".join(map(str, chosen.decision.candidates))
            raise EngineError(f"nothing connects {size} ranks: {reasons}")
        return chosen.driver.open(platform, members)

    world = group("world", spec.rank, spec.ranks)
    tensor = world if spec.pipeline == 1 else group(f"tensor {stage}", share, spec.tensor)
    pipeline = group(f"pipeline {share}", stage, spec.pipeline)
    pipeline = evolve(pipeline, layers=tuple(spec.layers))
    expert, data = tensor if spec.expert_parallel else ProcessGroup(), ProcessGroup()
    spread: SpreadExperts | None = None if balance is None else BalancedExperts(expert, balance)
    if spec.replicas > 1:
        store = _store(spec.replica_store, spec.ranks * spec.replicas, spec)
        first, size = spec.replica * spec.tensor, spec.replicas * spec.tensor
        expert = data = group(f"experts {stage}", first + share, size)
        if spec.tensor > 1:
            data = group(f"replicas {stage} {share}", spec.replica, spec.replicas)
        expert = evolve(expert, flag="data_parallel_size with enable_expert_parallel")
        spread = ReplicaExperts(expert, data, platform.device)
    mesh = Mesh(
        tensor=tensor, pipeline=pipeline, data=data, expert=expert, world=world, spread=spread
    )
    if spec.context == 1:
        return mesh
    context = tensor
    if spec.context < spec.tensor:
        among, part = divmod(share, spec.context)
        context = group(f"context {stage} {among}", part, spec.context)
    return ContextMesh.of(mesh, context, spec.interleave_tokens)


def _store(address: str, ranks: int, spec: RankSpec) -> c10d.Store:
    kind, _, where = address.partition(":")
    if kind == "file":
        return c10d.FileStore(where, ranks)
    if kind == "launcher":
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=spec.seconds)))
        return c10d.PrefixStore(where, store)
    host, _, port = where.rpartition(":")
    return c10d.TCPStore(host, int(port), ranks, is_master=spec.rank == 0)
