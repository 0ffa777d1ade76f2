"""Cache groups: layers with the same kind of cache share a block table and a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from attrs import evolve, frozen

from modulm.contracts.attention import AttentionBackend, AttentionSpec
from modulm.contracts.model import CacheKind, CacheSpec, StateSpec
from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CacheGroup", "extended", "group_caches"]


@frozen(kw_only=True)
class CacheGroup:
    """Layers with equal cache specs. `layers` are indices into the model's caches.

    window: tokens that a layer attends to, None for all; for cross attention, the longest encoder
    output. followers: layers with other specs that use the same block table, by backend.

    `block_bytes` is the size of a block across all layers, without layers that share an earlier
    layer's cache. For states, a "block" is a slot that holds the state after at most block_size
    more tokens than the previous block.
    """

    kind: CacheKind
    layers: tuple[int, ...]
    spec: AttentionSpec | StateSpec
    backend: AttentionBackend | None
    block_size: int
    window: int | None
    block_bytes: int
    followers: tuple[tuple[AttentionBackend, tuple[int, ...]], ...] = ()


def group_caches(
    caches: Sequence[CacheSpec],
    backends: Mapping[AttentionSpec, AttentionBackend],
    state_block: int,
) -> tuple[CacheGroup, ...]:
    """Return one group per distinct spec, in order of first occurrence.

    state_block: tokens between two positions whose states can be kept.
    """
    members: dict[AttentionSpec | StateSpec, list[int]] = {}
    following: dict[AttentionSpec | StateSpec, dict[AttentionSpec, list[int]]] = {}
    leaders: dict[str, AttentionSpec | StateSpec] = {}
    for index, cache in enumerate(caches):
        spec = cache.spec
        leader = spec if cache.follows is None else _leader(cache, leaders)
        leaders.setdefault(cache.layer, leader)
        if leader == spec:
            members.setdefault(spec, []).append(index)
        elif isinstance(spec, AttentionSpec):
            following.setdefault(leader, {}).setdefault(spec, []).append(index)
    groups: list[CacheGroup] = []
    for spec, layers in members.items():
        owners = sum(caches[layer].shares is None for layer in layers)
        if isinstance(spec, StateSpec):
            state_group = CacheGroup(
                kind=CacheKind.STATE,
                layers=tuple(layers),
                spec=spec,
                backend=None,
                block_size=state_block,
                window=None,
                block_bytes=owners * _state_bytes(spec.tensors),
            )
            groups.append(state_group)
            continue
        backend = backends[spec]
        followers = [(backends[other], tuple(at)) for other, at in following.get(spec, {}).items()]
        size = owners * backend.layout(1).block_bytes
        for other, at in followers:
            if other.block_size != backend.block_size:
                raise UnsupportedError(
                    f"{caches[at[0]].layer} uses a block table of {backend.block_size} tokens "
                    f"per block, but its backend {other.name} needs {other.block_size}"
                )
            size += len(at) * other.layout(1).block_bytes
        paged_group = CacheGroup(
            kind=CacheKind.CROSS if spec.cross else CacheKind.ATTENTION,
            layers=tuple(layers),
            spec=spec,
            backend=backend,
            block_size=backend.block_size,
            window=spec.cross or spec.window,
            block_bytes=size,
            followers=tuple(followers),
        )
        groups.append(paged_group)
    return tuple(groups)


def _leader(
    cache: CacheSpec, leaders: Mapping[str, AttentionSpec | StateSpec]
) -> AttentionSpec | StateSpec:
    """Return the spec of the group whose block table `cache` uses."""
    spec, leader = cache.spec, leaders.get(str(cache.follows))
    if not (isinstance(spec, AttentionSpec) and isinstance(leader, AttentionSpec)):
        raise UnsupportedError(f"{cache.layer}: {cache.follows} is not an earlier attention layer")
    if leader.window is not None and leader.window < (spec.window or leader.window + 1):
        raise UnsupportedError(f"{cache.layer} attends beyond the window of {cache.follows}")
    return leader


def extended(
    groups: Sequence[CacheGroup],
    caches: Sequence[CacheSpec],
    first: int,
    backends: Mapping[AttentionSpec, AttentionBackend],
) -> tuple[CacheGroup, ...]:
    """Add further paged caches to the groups, in the blocks of similar layers.

    first: index of the first of `caches` among all caches. backends: for caches that have their
    own; they use the block table of a group with the same window, or get a new group. Raises
    UnsupportedError if a cache has no backend and no similar layer.
    """
    extended_groups = list(groups)
    for index, cache in enumerate(caches, first):
        backend = None if isinstance(cache.spec, StateSpec) else backends.get(cache.spec)
        at = next(
            (i for i, group in enumerate(extended_groups) if _takes(group, cache, backend)), None
        )
        if backend is not None and at is None:
            at = len(extended_groups)
            new_group = CacheGroup(
                kind=CacheKind.ATTENTION,
                layers=(),
                spec=backend.spec,
                backend=backend,
                block_size=backend.block_size,
                window=backend.spec.window,
                block_bytes=0,
            )
            extended_groups.append(new_group)
        if at is None:
            raise UnsupportedError(f"{cache.layer}: the model has no similar attention layer")
        extended_groups[at] = _with_cache(extended_groups[at], index, cache, backend)
    return tuple(extended_groups)


def _takes(group: CacheGroup, cache: CacheSpec, backend: AttentionBackend | None) -> bool:
    """Whether a cache fits into the group's blocks."""
    if group.backend is None or backend is None:
        return group.backend is not None and group.spec == cache.spec
    window = backend.spec.window
    sees = group.window is None or (window is not None and window <= group.window)
    return sees and group.block_size == backend.block_size


def _with_cache(
    group: CacheGroup, index: int, cache: CacheSpec, backend: AttentionBackend | None
) -> CacheGroup:
    """Add a cache to the group; with another backend it follows the group's block table."""
    used = group.backend if backend is None else backend
    size = 0 if cache.shares or used is None else used.layout(1).block_bytes
    group = evolve(group, block_bytes=group.block_bytes + size)
    if backend is None or backend is group.backend:
        return evolve(group, layers=(*group.layers, index))
    followers = dict(group.followers)
    followers[backend] = (*followers.get(backend, ()), index)
    return evolve(group, followers=tuple(followers.items()))


def _state_bytes(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> int:
    return sum(prod(shape) * getattr(torch, dtype).itemsize for _, shape, dtype in tensors)
