"""Cache groups: layers that keep the same kind of thing share a block table and a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Literal

import torch
from attrs import frozen

from modulm.contracts.attention import AttentionBackend, AttentionSpec
from modulm.contracts.model import CacheSpec, StateSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CacheGroup", "group_caches"]


@frozen
class CacheGroup:
    """Layers with equal specs. `layers` are indices into the model's caches.

    `block_bytes` is what one block takes in all layers together, those left out that share an
    earlier layer's cache; for states one "block" is a slot, which holds the state after at most
    block_size tokens more than the block before.
    """

    kind: Literal["attention", "state"]
    layers: tuple[int, ...]
    spec: AttentionSpec | StateSpec
    backend: AttentionBackend | None
    block_size: int
    window: int | None
    block_bytes: int


def group_caches(
    caches: Sequence[CacheSpec],
    backends: Mapping[AttentionSpec, AttentionBackend],
    state_block: int,
) -> tuple[CacheGroup, ...]:
    """One group per distinct spec, in the order in which they first occur.

    state_block: tokens between two lengths of which states can be kept.
    """
    members: dict[AttentionSpec | StateSpec, list[int]] = {}
    for index, cache in enumerate(caches):
        members.setdefault(cache.spec, []).append(index)
    groups: list[CacheGroup] = []
    for spec, layers in members.items():
        owners = sum(caches[layer].shares is None for layer in layers)
        if isinstance(spec, StateSpec):
            size = owners * _state_bytes(spec.tensors)
            groups.append(CacheGroup("state", tuple(layers), spec, None, state_block, None, size))
            continue
        backend = backends[spec]
        size = owners * backend.layout(1).block_bytes
        groups.append(
            CacheGroup(
                "attention", tuple(layers), spec, backend, backend.block_size, spec.window, size
            )
        )
    return tuple(groups)


def _state_bytes(tensors: Iterable[tuple[str, tuple[int, ...], str]]) -> int:
    return sum(prod(shape) * getattr(torch, dtype).itemsize for _, shape, dtype in tensors)
