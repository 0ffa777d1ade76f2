"""Sizes of the caches: their memory budget, blocks per group, and tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from modulm.contracts.model import CacheKind, CacheSpec, StateSpec
from modulm.errors import ConfigError

if TYPE_CHECKING:
    from modulm.contracts.attention import AttentionBackend
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.platform import Memory, Platform
    from modulm.loading import CacheGroup
    from modulm.parallel import ProcessGroup

__all__ = ["Sizing", "agreed", "allocate", "blocks_needed", "cache_budget", "share_out"]

#: Fraction of the memory after weights that is reserved for activations, if not measured.
_ACTIVATIONS = 0.1
_MIB = 2**20
_UNSHARED = (
    "layers keep a state per sequence: prompts that begin alike are each computed in full "
    "(--mamba-cache-mode all keeps states of their beginnings)"
)
#: Slots per row if states are cached: one read, one written, two of earlier lengths.
_KEPT_SLOTS = 4
#: Minimum number of slots for one sequence: see `manager._State`.
_LEAST_KEPT = 3
_KINDS = tuple(CacheKind)
#: Kind, block size and window.
GroupShape = tuple[CacheKind, int, int | None]


@frozen
class Sizing:
    """Sizes of the caches.

    blocks: per group, including the null block. max_model_len: as far as it fits. groups: of all
    ranks. places: indices of this rank's groups among them.
    """

    blocks: tuple[int, ...]
    max_model_len: int
    notes: tuple[str, ...] = ()
    groups: tuple[GroupShape, ...] = ()
    places: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, groups: Sequence[CacheGroup], blocks: Sequence[int], length: int, notes: Sequence[str]
    ) -> Sizing:
        """Create the sizes of a single rank."""
        shapes = tuple((g.kind, g.block_size, g.window) for g in groups)
        return cls(tuple(blocks), length, tuple(notes), shapes, tuple(range(len(shapes))))

    @property
    def own(self) -> list[int]:
        """Number of blocks of each of this rank's groups."""
        return [self.blocks[index] for index in self.places]


def cache_budget(
    config: EngineConfig, memory: Memory, activations: Callable[[], int | None]
) -> int:
    """Return the bytes for all caches. memory: of the device, once the weights are loaded.

    This is `kv_cache_memory_bytes`, if set. Otherwise weights and caches together may use
    `gpu_memory_utilization` of the device, but at most the free memory. activations: measures the
    additional memory of the largest step; returns None if it cannot be measured.
    """
    if config.cache.kv_cache_memory_bytes is not None:
        return config.cache.kv_cache_memory_bytes
    share = config.cache.gpu_memory_utilization
    left = min(memory.total * share - (memory.total - memory.free), memory.free * share)
    if left <= 0:  # others hold most of the device: take a share of what they left
        left = memory.free * share
    measured = activations()
    return int(left * (1.0 - _ACTIVATIONS)) if measured is None else int(left) - measured


def share_out(
    groups: Sequence[CacheGroup],
    budget: int,
    *,
    max_model_len: int,
    chunk: int,
    rows: int,
    drafts: int = 0,
    override: int | None = None,
) -> Sizing:
    """Divide the budget so that as many full-length sequences as possible fit, at most `rows`.

    chunk: maximum tokens per step. drafts: maximum drafts per row, each of which needs a state
    slot. override: blocks of every paged group, regardless of the budget. If not even one sequence
    of `max_model_len` fits, the length is reduced. Raises ConfigError, with the sizes, if none
    fits.
    """
    stateful = [g for g in groups if g.kind == "state"]
    kept = all(g.block_size < max_model_len for g in stateful)
    notes: tuple[str, ...] = () if kept else (_UNSHARED,)
    slots_wanted = rows * ((_KEPT_SLOTS if kept else 1) + drafts)
    if override is not None:
        least = {
            g: blocks_needed(g, max_model_len, chunk) + 1 if g.kind == "cross" else 2
            for g in groups
        }
        blocks = tuple(
            slots_wanted + 1 if g.kind == "state" else max(override, least[g]) for g in groups
        )
        fits = _longest(groups, blocks, max_model_len, chunk)
        if fits != max_model_len:
            notes = (*notes, _shrunk(max_model_len, fits, "given blocks"))
        return Sizing.of(groups, blocks, fits, notes)
    length = max_model_len
    nulls = sum(g.block_bytes for g in groups if g.kind != "state")
    room = budget - nulls - _bytes_of_one(groups, length, chunk)
    slots = _slots(stateful, min(room, budget // 2) if nulls else room, slots_wanted, kept)
    if stateful and slots < rows:
        notes = (*notes, f"the states of {slots} sequences fit: no more run at once")
    states = sum(g.block_bytes * (slots + 1) for g in stateful)
    left = budget - states - nulls
    if left < _bytes_of_one(groups, length, chunk):
        length = _fitting(groups, left, max_model_len, chunk)
        if length == 0:
            raise _too_small(groups, budget, states, max_model_len, chunk)
        why = f"{max(budget, 0) / _MIB:,.1f} MiB of cache"
        notes = (*notes, _shrunk(max_model_len, length, why))
    one = _bytes_of_one(groups, length, chunk)
    sequences = min(float(rows), left / one) if one else float(rows)
    blocks = tuple(
        slots + 1 if g.kind == "state" else int(sequences * blocks_needed(g, length, chunk)) + 1
        for g in groups
    )
    return Sizing.of(groups, blocks, length, notes)


def agreed(sizing: Sizing, ranks: ProcessGroup) -> Sizing:
    """Combine the sizes of all ranks: the minimum for each group.

    The groups are those of the first rank, followed by additional groups of other ranks; `places`
    locates a rank's own groups.
    """
    if ranks.size == 1:
        return sizing
    own = torch.tensor([[len(sizing.groups), sizing.max_model_len]])
    counts, lengths = ranks.all_gather(own).view(-1, 2).unbind(-1)
    table = torch.full((max(int(counts.max()), 1), 4), -1)
    for row, (group, blocks) in enumerate(zip(sizing.groups, sizing.blocks, strict=True)):
        table[row] = torch.tensor([_KINDS.index(group[0]), group[1], group[2] or -1, blocks])
    tables = ranks.all_gather(table.view(1, -1)).view(ranks.size, *table.shape)
    groups: list[GroupShape] = []
    fitting: list[int] = []
    places: list[int] = []
    for rank, count in enumerate(counts.tolist()):
        taken: list[int] = []
        for kind, size, window, blocks in tables[rank, :count].tolist():
            shape = (_KINDS[kind], size, None if window < 0 else window)
            same = (i for i, other in enumerate(groups) if other == shape and i not in taken)
            index = next(same, len(groups))
            if index == len(groups):
                groups.append(shape)
                fitting.append(blocks)
            fitting[index] = min(fitting[index], blocks)
            taken.append(index)
        places = taken if rank == ranks.rank else places
    length = int(lengths.min())
    return Sizing(tuple(fitting), length, sizing.notes, tuple(groups), tuple(places))


def _slots(groups: Sequence[CacheGroup], room: int, wanted: int, kept: bool) -> int:
    """Return the state slots, without the null slot, that fit into `room`; enough for one row."""
    each = sum(group.block_bytes for group in groups)
    fit = max(room, 0) // each - 1 if each else wanted
    return max(min(wanted, fit), _LEAST_KEPT if kept else 1)


def blocks_needed(group: CacheGroup, length: int, chunk: int) -> int:
    """Return the maximum blocks of one sequence of `length` tokens.

    A window needs blocks for itself and the chunks of two steps, all of which may straddle blocks.
    """
    if group.kind == "cross":
        return -(-(group.window or 0) // group.block_size)
    full: int = -(-length // group.block_size)
    if group.window is None:
        return full
    return min(full, -((-group.window - 2 * chunk) // group.block_size) + 2)


def _bytes_of_one(groups: Sequence[CacheGroup], length: int, chunk: int) -> int:
    paged = (g for g in groups if g.kind != "state")
    return sum(blocks_needed(g, length, chunk) * g.block_bytes for g in paged)


def _fitting(groups: Sequence[CacheGroup], left: int, longest: int, chunk: int) -> int:
    """Return the maximum length of one sequence within `left` bytes; 0 if none fits."""
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        fits = _bytes_of_one(groups, middle, chunk) <= left
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _longest(groups: Sequence[CacheGroup], blocks: Sequence[int], longest: int, chunk: int) -> int:
    """Return the maximum length of one sequence within `blocks`."""
    for group, count in zip(groups, blocks, strict=True):
        if group.kind != "state" and blocks_needed(group, longest, chunk) > count - 1:
            longest = min(longest, (count - 1) * group.block_size)
    return longest


def _shrunk(requested: int, fits: int, why: str) -> str:
    return f"max_model_len is {fits} instead of {requested}: no longer sequence fits into the {why}"


def _too_small(
    groups: Sequence[CacheGroup], budget: int, states: int, length: int, chunk: int
) -> ConfigError:
    needed = _bytes_of_one(groups, length, chunk) + states
    return ConfigError(
        "max_model_len",
        f"one sequence of {length} tokens needs {needed / _MIB:,.1f} MiB of cache and "
        f"{max(budget, 0) / _MIB:,.1f} MiB are available; lower max_model_len or raise "
        "gpu_memory_utilization or kv_cache_memory_bytes",
    )


def allocate(
    specs: Sequence[CacheSpec],
    groups: Sequence[CacheGroup],
    blocks: Sequence[int],
    platform: Platform,
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Allocate the zeroed cache of each spec; also return each one's index into `Batch.plans`.

    A paged layer gets one tensor in its backend's layout, a state layer a dict of name -> [slots,
    ...]. A layer that shares another's cache gets the same object.
    """
    caches: list[Any] = [None] * len(specs)
    owners = [0] * len(specs)
    plan = len(groups)
    for index, (group, count) in enumerate(zip(groups, blocks, strict=True)):
        for layer in group.layers:
            owners[layer] = index
            if specs[layer].shares is None:
                caches[layer] = _one(specs[layer], group.backend, count, platform)
        for backend, layers in group.followers:
            for layer in layers:
                owners[layer] = plan
                caches[layer] = _one(specs[layer], backend, count, platform)
            plan += 1
    names = {spec.layer: number for number, spec in enumerate(specs)}
    for number, spec in enumerate(specs):
        if spec.shares is not None:
            caches[number], owners[number] = caches[names[spec.shares]], owners[names[spec.shares]]
    return tuple(caches), tuple(owners)


def _one(spec: CacheSpec, backend: AttentionBackend | None, blocks: int, platform: Platform) -> Any:
    if isinstance(spec.spec, StateSpec):
        return {
            name: platform.zeros((blocks, *shape), _dtype(dtype))
            for name, shape, dtype in spec.spec.tensors
        }
    if backend is None:
        raise ConfigError("attention_backend", f"layer {spec.layer} has no attention backend")
    layout = backend.layout(blocks)
    return platform.zeros(layout.shape, _dtype(layout.dtype))


def _dtype(name: str) -> torch.dtype:
    dtype = torch.__dict__[name]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch has no dtype {name!r}")
    return dtype
