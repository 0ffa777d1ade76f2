"""Cache groups: layers that keep the same kind of thing share a block table and a plan."""

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
    """Layers with equal specs. `layers` are indices into the model's caches.

    window: tokens that a layer sees, None for all; in a group of cross attention the most that an
    encoder gives. followers: layers with other specs that keep their own by the same block table,
    by backend.
    `block_bytes` is what one block takes in all layers together, those left out that share an
    earlier layer's cache; for states one "block" is a slot, which holds the state after at most
    block_size tokens more than the block before.
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
    """One group per distinct spec, in the order in which they first occur.

    state_block: tokens between two lengths of which states can be kept.
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
                    f"{caches[at[0]].layer} follows a block table of {backend.block_size} tokens "
                    f"per block, its backend {other.name} takes {other.block_size}"
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
    """The spec of the group whose block table `cache` follows."""
    spec, leader = cache.spec, leaders.get(str(cache.follows))
    if not (isinstance(spec, AttentionSpec) and isinstance(leader, AttentionSpec)):
        raise UnsupportedError(f"{cache.layer} follows {cache.follows}: no earlier attention layer")
    if leader.window is not None and leader.window < (spec.window or leader.window + 1):
        raise UnsupportedError(f"{cache.layer} looks back beyond the window of {cache.follows}")
    return leader


def extended(
    groups: Sequence[CacheGroup],
    caches: Sequence[CacheSpec],
    first: int,
    backends: Mapping[AttentionSpec, AttentionBackend],
) -> tuple[CacheGroup, ...]:
    """The groups with further paged caches, in the blocks of the layers that are like them.

    first: the index of the first of `caches` among all. backends: of those that bring their own;
    they follow the block table of a group that sees as far, or make a group of their own. Raises
    UnsupportedError where a cache brings none and no layer is like it.
    """
    made = list(groups)
    for index, cache in enumerate(caches, first):
        backend = None if isinstance(cache.spec, StateSpec) else backends.get(cache.spec)
        at = next((i for i, group in enumerate(made) if _takes(group, cache, backend)), None)
        if backend is not None and at is None:
            at = len(made)
            own_group = CacheGroup(
                kind=CacheKind.ATTENTION,
                layers=(),
                spec=backend.spec,
                backend=backend,
                block_size=backend.block_size,
                window=backend.spec.window,
                block_bytes=0,
            )
            made.append(own_group)
        if at is None:
            raise UnsupportedError(f"{cache.layer}: no attention layer of the model is like it")
        made[at] = _with_cache(made[at], index, cache, backend)
    return tuple(made)


def _takes(group: CacheGroup, cache: CacheSpec, backend: AttentionBackend | None) -> bool:
    """Whether a cache can lie in the group's blocks."""
    if group.backend is None or backend is None:
        return group.backend is not None and group.spec == cache.spec
    window = backend.spec.window
    sees = group.window is None or (window is not None and window <= group.window)
    return sees and group.block_size == backend.block_size


def _with_cache(
    group: CacheGroup, index: int, cache: CacheSpec, backend: AttentionBackend | None
) -> CacheGroup:
    """The group with one more cache; with a backend of its own it follows the block table."""
    used = group.backend if backend is None else backend
    size = 0 if cache.shares or used is None else used.layout(1).block_bytes
    group = evolve(group, block_bytes=group.block_bytes + size)
    if backend is None or backend is group.backend:
        return evolve(group, layers=(*group.layers, index))
    own = dict(group.followers)
    own[backend] = (*own.get(backend, ()), index)
    return evolve(group, followers=tuple(own.items()))


def _state_bytes(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> int:
    return sum(prod(shape) * getattr(torch, dtype).itemsize for _, shape, dtype in tensors)
