"""Measures the memory of the largest step, so that the caches can use the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from modulm.contracts.executor import Plan
from modulm.contracts.kernels import RecordedForward
from modulm.engine.kv_cache.sizing import allocate
from modulm.engine.worker.input_batch import BatchBuilder, GroupPlanner

if TYPE_CHECKING:
    from modulm.contracts.kernels import Forward
    from modulm.contracts.model import Batch, CacheSpec
    from modulm.contracts.platform import Platform
    from modulm.loading import Loaded
    from modulm.loading.cache_groups import CacheGroup

__all__ = ["null_plan", "record", "step_memory"]


def null_plan(counts: np.ndarray, block_sizes: Sequence[int], reach: int = 0) -> Plan:
    """Build a plan of new rows in null blocks. counts: [rows] int32, tokens of each.

    reach: minimum number of tokens that block tables cover.
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
    vary: Callable[[Batch], Batch | None] | None = None,
) -> None:
    """Record some of `forward.steps`. reach: as in `null_plan`. vary: `PartRunner.vary`."""
    for counts in forward.steps[steps]:
        plan = null_plan(counts, block_sizes, reach)
        with platform.queue():
            batch = builder.build(plan, np.maximum(counts.cumsum() - 1, 0))
            varied = batch if vary is None else vary(batch)
            if varied is not None:
                forward.record(varied)
    platform.synchronize()


def _recordings(
    forward: RecordedForward,
    builder: BatchBuilder,
    block_sizes: Sequence[int],
    reach: int,
    platform: Platform,
) -> int:
    """Estimate the bytes of all recordings from the first two."""
    sizes = []
    for index in range(2):
        record(forward, builder, block_sizes, reach, platform, slice(index, index + 1))
        sizes.append(forward.memory)
    forward.clear()
    return sizes[0] + (sizes[1] - sizes[0]) * max(len(forward.steps) - 1, 0)


@torch.inference_mode()
def step_memory(
    loaded: Loaded,
    specs: Sequence[CacheSpec],
    groups: Sequence[CacheGroup],
    platform: Platform,
    forward: Forward,
    rows: int,
    tokens: int,
    kinds: int = 1,
) -> int | None:
    """Measure the bytes of the largest step, and of all recordings, beside weights and caches.

    Runs a step of `tokens` tokens in up to `rows` rows in the null blocks. kinds: how often each
    step is recorded, with different inputs. Returns None if the platform does not measure memory.
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
    size = platform.peak_memory() - before
    if isinstance(forward, RecordedForward):
        sizes = [group.block_size for group in groups]
        size += kinds * _recordings(forward, builder, sizes, loaded.max_model_len, platform)
    del caches, builder, batch, hidden
    platform.empty_cache()
    return size
