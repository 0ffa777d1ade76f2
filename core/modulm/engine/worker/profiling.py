"""Measures what the largest step takes, so that the caches get the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from modulm.contracts.executor import Plan
from modulm.contracts.kernels import RecordedForward
from modulm.engine.kv_cache.sizing import allocate
from modulm.engine.worker.input_batch import BatchBuilder, GroupPlanner

if TYPE_CHECKING:
    from modulm.contracts.kernels import Forward
    from modulm.contracts.model import CacheSpec
    from modulm.contracts.platform import Platform
    from modulm.loading import Loaded
    from modulm.loading.cache_groups import CacheGroup

__all__ = ["null_plan", "record", "step_memory"]


def null_plan(counts: np.ndarray, block_sizes: Sequence[int], reach: int = 0) -> Plan:
    """A step of rows of so many tokens from their start, all in the null blocks. reach: tokens for
    which block tables have room, if there are more than the step's.
    """
    rows, longest = len(counts), max(int(counts.max()), reach)
    return Plan(
        step=-1,
        rows=np.arange(rows, dtype=np.int32),
        starts=np.zeros(rows, dtype=np.int32),
        counts=counts,
        tokens=np.zeros(int(counts.sum()), dtype=np.int64),
        tables=tuple(np.zeros((rows, -(-longest // size)), np.int32) for size in block_sizes),
        samples=np.ones(rows, dtype=bool),
    )


def record(
    forward: RecordedForward,
    builder: BatchBuilder,
    block_sizes: Sequence[int],
    reach: int,
    platform: Platform,
    steps: slice = slice(None),
) -> None:
    """Record some of the steps that `forward` wants to; reach: as `null_plan` has it."""
    for counts in forward.steps[steps]:
        plan = null_plan(counts, block_sizes, reach)
        with platform.queue():
            forward.record(builder.build(plan, np.maximum(counts.cumsum() - 1, 0)))
    platform.synchronize()


def _recordings(
    forward: RecordedForward,
    builder: BatchBuilder,
    block_sizes: Sequence[int],
    reach: int,
    platform: Platform,
) -> int:
    """Bytes that all recordings of `forward` will take: what the first one does, and as much for
    each of the others as the second adds.
    """
    held = []
    for place in range(2):
        record(forward, builder, block_sizes, reach, platform, slice(place, place + 1))
        held.append(forward.held)
    forward.clear()
    return held[0] + (held[1] - held[0]) * max(len(forward.steps) - 1, 0)


@torch.inference_mode()
def step_memory(
    loaded: Loaded,
    specs: Sequence[CacheSpec],
    groups: Sequence[CacheGroup],
    platform: Platform,
    forward: Forward,
    rows: int,
    tokens: int,
) -> int | None:
    """Bytes that a step of `tokens` tokens, of as many of `rows` as can be, takes beside weights
    and caches, by running one in the null blocks, and those of the recordings of `forward`. None
    where the platform counts none.
    """
    if platform.reset_peak_memory() is None:
        return None
    caches, owners = allocate(specs, groups, [2] * len(groups), platform)
    builder = BatchBuilder(
        GroupPlanner.all(groups),
        caches,
        owners,
        rows=rows + tokens,
        tokens=tokens,
        platform=platform,
    )
    counts = np.diff(np.linspace(0, tokens, min(rows, tokens) + 1).astype(np.int32))
    counts = np.minimum(counts, loaded.max_model_len).astype(np.int32)
    plan = null_plan(counts, [group.block_size for group in groups])
    before = platform.reset_peak_memory() or 0
    with platform.queue():
        batch = builder.build(plan, counts.cumsum() - 1)
        hidden = loaded.model.forward(batch)
        loaded.ops.argmax(loaded.model.logits(hidden[batch.sample]).float())
    platform.synchronize()
    taken = platform.peak_memory() - before
    if isinstance(forward, RecordedForward):
        sizes = [group.block_size for group in groups]
        taken += _recordings(forward, builder, sizes, loaded.max_model_len, platform)
    del caches, builder, batch, hidden
    platform.empty_cache()
    return taken
