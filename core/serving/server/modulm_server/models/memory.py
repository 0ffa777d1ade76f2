"""Memory of engines: measured for those that run, estimated for those that do not."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from modulm.contracts.platform import Memory
from modulm.errors import ModulmError
from modulm_fleet.placement import placement
from modulm_memory.usage import measure

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.plugins.manager import PluginManager
    from modulm_memory.estimate import Estimate

__all__ = ["Needs", "changes_within", "measure", "needs_of"]

log = logging.getLogger("modulm_server")

#: Bytes of a process that has imported an engine, where they cannot be measured.
_PROCESS = 200 << 20
#: Part of the budget that the caches of one model may use, unless a request needs more.
_CACHES = 4


@frozen
class Needs:
    """config: of the engine. bytes: that it needs when loaded, on the host and on devices.
    estimated: whether these follow from the model's layers, and not from the sizes of its files.
    """

    config: EngineConfig
    bytes: int
    estimated: bool = True


def needs_of(
    config: EngineConfig, plugins: PluginManager, checkpoint: Path, budget: int | None
) -> Needs:
    """Estimate what a model will hold: its processes, weights, caches, adapters and a step.

    checkpoint: a folder, or one file; the sizes of its weights are the estimate for models that
    cannot be estimated. budget: of all models. With one, a format of the weights and the size of
    steps that the user left open follow from it, and caches whose size is not set get a quarter of
    it, or as much as one request of the longest context needs, if that fits.
    """
    from modulm_memory.estimate import estimate
    from modulm_memory.fitting import stored_bytes

    process = _own_process()
    try:
        found = estimate(config, plugins)
        if budget is not None:
            config, found = _bounded(config, plugins, found, budget)
    except ModulmError as error:  # if loading fails as well, it says so
        log.debug("Memory of %s is not estimated: %s", config.model.model, error)
        return Needs(config, process + stored_bytes(checkpoint), estimated=False)
    each = (process + rank.fixed + rank.step + rank.cache_bytes for rank in found.ranks)
    return Needs(config, sum(each) * _replicas(config))


def _replicas(config: EngineConfig) -> int:
    """The replicas of a model on this machine."""
    return len(placement(config).here)


def _own_process() -> int:
    return measure([os.getpid()], tree=False) or _PROCESS


def _bounded(
    config: EngineConfig, plugins: PluginManager, found: Estimate, budget: int
) -> tuple[EngineConfig, Estimate]:
    """Return a configuration that allocates at most a budget, as far as it can, and its estimate.

    found: the estimate without a budget.
    """
    from modulm_memory.estimate import estimate

    count = len(found.ranks) * _replicas(config)
    room = _room(budget, count)
    if any(rank.memory.free > room.free for rank in found.ranks):
        smaller = estimate(config, plugins, memory=room)
        config = config.with_parts(_smaller_settings(config, found.config, smaller.config))
        found = estimate(config, plugins)
    if _sizes_caches(config):
        one = max(rank.caches_of_one(found.config, found.length) for rank in found.ranks)
        left = room.free - max(rank.fixed + rank.step for rank in found.ranks)
        limit = min(max(budget // (_CACHES * count), one), left)
        if 0 < limit < max(rank.cache_bytes for rank in found.ranks):
            config = config.with_parts({"kv_cache_memory_bytes": limit})
            found = estimate(config, plugins)
    return config, found


def _room(size: int, ranks: int) -> Memory:
    """The memory of each rank beside its process. ranks: of all replicas."""
    room = max(size // ranks - _own_process(), 0)
    return Memory(total=room, free=room)


def _smaller_settings(
    config: EngineConfig, before: EngineConfig, after: EngineConfig
) -> dict[str, Any]:
    """The settings that the user left open and that a budget changes."""
    flags: dict[str, Any] = {}
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        value = getattr(after.scheduler, name)
        if getattr(config.scheduler, name) is None and value != getattr(before.scheduler, name):
            flags[name] = value
    if config.model.quantization == "auto":
        flags["quantization"] = after.model.quantization
    for name, value in flags.items():
        log.info("%s: %s is %s within the memory budget", config.model.model, name, value)
    return flags


def changes_within(config: EngineConfig, plugins: PluginManager, size: int) -> list[str]:
    """Return flags, with reasons, with which a model needs at most `size` bytes; [] for models that
    cannot be estimated.
    """
    from modulm_memory.advice import changes_for
    from modulm_memory.estimate import estimate

    try:
        count = len(estimate(config, plugins).ranks) * _replicas(config)
        memory = _room(size, count)
        found = estimate(config, plugins, memory=memory)
        left = min(memory.free - rank.fixed - rank.step for rank in found.ranks)
        one = max(rank.caches_of_one(found.config, found.length) for rank in found.ranks)
        if one <= left and max(rank.cache_bytes for rank in found.ranks) > left:
            return [f"--kv-cache-memory-bytes {left}"]
        changes = changes_for(found, plugins, config.changed(), config, memory)
    except ModulmError:
        return []
    return [f"{_flags(change.flags)} ({change.reason})" for change in changes]


def _flags(flags: Mapping[str, Any]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items())


def _sizes_caches(config: EngineConfig) -> bool:
    """Whether the engine would choose the size of its caches."""
    cache = config.cache
    return cache.kv_cache_memory_bytes is None and cache.num_gpu_blocks_override is None
