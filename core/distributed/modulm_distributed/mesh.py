"""From a rank's number to its groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen
from torch._C import _distributed_c10d as c10d

from modulm.errors import EngineError, PluginError
from modulm.parallel import Mesh, ProcessGroup
from modulm_distributed.collectives import Members

if TYPE_CHECKING:
    from modulm.contracts.platform import Platform
    from modulm.plugins.manager import PluginManager
    from modulm_distributed.collectives import Collectives

__all__ = ["Place", "open_mesh"]


@frozen
class Place:
    """Where a worker stands. rank: of tensor * pipeline; ranks of one stage follow one another.

    store: "file:PATH" or "tcp:HOST:PORT", where all ranks find one another; rank 0 serves the
    latter. hosts: on how many machines the ranks are. seconds: how long they wait for another.
    """

    rank: int
    tensor: int
    pipeline: int
    store: str
    hosts: int = 1
    seconds: float = 300.0

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.tensor * self.pipeline


def open_mesh(place: Place, platform: Platform, plugins: PluginManager) -> Mesh:
    """Connect this rank with those it shares something with. Raises EngineError."""
    if place.ranks == 1:
        return Mesh()
    store = _store(place)
    stage, share = divmod(place.rank, place.tensor)

    def group(name: str, rank: int, size: int) -> ProcessGroup:
        if size == 1:
            return ProcessGroup()
        members = Members(name, rank, size, store, place.hosts == 1, place.seconds)
        return _choose(platform, members, plugins).open(platform, members)

    world = group("world", place.rank, place.ranks)
    tensor = world if place.pipeline == 1 else group(f"tensor {stage}", share, place.tensor)
    pipeline = group(f"pipeline {share}", stage, place.pipeline)
    return Mesh(tensor=tensor, pipeline=pipeline, world=world)


def _store(place: Place) -> c10d.Store:
    kind, _, where = place.store.partition(":")
    if kind == "file":
        return c10d.FileStore(where, place.ranks)
    host, _, port = where.rpartition(":")
    return c10d.TCPStore(host, int(port), place.ranks, is_master=place.rank == 0)


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
