"""Bytes of a step's activations, from the widths of a model's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from modulm.contracts.quantization import LinearKind, LinearSpec

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.nn.builder import Shared

__all__ = ["step_bytes"]

#: Tensors as wide as the stream that are alive beside a layer's input and output: the residual, its
#: normalized copy, and a sum.
_STREAM = 3
#: Copies of the logits while tokens are chosen: as computed, in fp32, and filtered.
_LOGITS_FP32 = 2


def step_bytes(shared: Shared, config: EngineConfig) -> int:
    """Estimate the activations of the largest step: the widest layer, or the logits of all rows.

    A layer has its input and its output in memory, beside the stream.
    """
    tokens = int(config.scheduler.max_num_batched_tokens or 1)
    rows = min(int(config.scheduler.max_num_seqs or 1), tokens)
    size = shared.dtype.itemsize
    widest = stream = logits = 0
    for unit in shared.units:
        spec = getattr(unit.module, "spec", None)
        if not isinstance(spec, LinearSpec):
            continue
        if spec.kind is LinearKind.LM_HEAD:
            whole = sum(shard.total for shard in spec.shards)
            logits = rows * whole * (size + _LOGITS_FP32 * torch.float32.itemsize)
        if spec.kind in (LinearKind.EMBEDDING, LinearKind.LM_HEAD):
            stream = max(stream, spec.inputs)
        else:
            widest = max(widest, spec.inputs + spec.outputs)
    return max(tokens * (widest + _STREAM * stream) * size, logits + tokens * stream * size)
