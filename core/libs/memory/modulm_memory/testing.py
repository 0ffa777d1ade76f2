"""Measures what a rank holds once a model is loaded, and in a step, to compare estimates."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch._subclasses import FakeTensor

from modulm.engine.kv_cache.sizing import allocate
from modulm.engine.parts import open_parts
from modulm.loading import load_model, resolve_checkpoint
from modulm_distributed.mesh import RankSpec, planned_mesh
from modulm_memory.held import HeldMemory
from modulm_memory.rehearsal import step_allocations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.config import EngineConfig
    from modulm.plugins.manager import PluginManager

__all__ = ["Held", "measured"]


@frozen
class Held:
    """What a rank held, in bytes. step: the most at once in the step of a prompt."""

    weights: int
    caches: int
    step: int


def measured(
    config: EngineConfig,
    plugins: PluginManager,
    rank: int,
    blocks: Sequence[int],
    tokens: int = 0,
) -> Held:
    """Load a rank's weights, allocate caches of `blocks`, and compute a prompt of `tokens` tokens.

    Counts all tensors of the process that were not there before: the garbage collector never looks
    at those again (`gc.freeze`). The rank is loaded in this process, without connections to the
    others.
    """
    opened = resolve_checkpoint(config, plugins, "server")
    resolved, platform = opened.resolved.config, opened.platform
    spec = RankSpec.all_ranks(resolved.parallel, "")[rank]
    masks = any(part.masks for part in open_parts(resolved, plugins))
    gc.collect()
    gc.freeze()
    loaded = load_model(
        resolved, opened.checkpoint, platform, plugins, planned_mesh(spec), masks=masks
    )
    weights = _new_tensors().bytes
    held = HeldMemory()
    caches = allocate(loaded.model.caches, loaded.groups, blocks, platform)
    for cache in caches[0]:
        held.add(cache.values() if isinstance(cache, dict) else (cache,))
    step = tokens and max(step_allocations(loaded.model, loaded.groups, caches, platform, tokens))
    return Held(weights, held.bytes, step)


def _new_tensors() -> HeldMemory:
    """The tensors that were made since `gc.freeze`."""
    gc.collect()
    held = HeldMemory()
    kinds = ((each, type(each)) for each in gc.get_objects())
    # A compiler's fake tensors hold nothing.
    held.add(
        each
        for each, kind in kinds
        if issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor)
    )
    return held
