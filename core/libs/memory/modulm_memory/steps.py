"""Bytes of a step's activations, from the widths of a model's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from modulm.contracts.quantization import LinearKind, LinearSpec

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.nn.builder import Shared

__all__ = ["StepWidths", "step_bytes", "step_widths"]

#: Tensors as wide as the stream that are alive beside a layer's input and output: the residual, its
#: normalized copy, and a sum.
_STREAM = 3
#: Copies of the logits while tokens are chosen: as computed, in fp32, and filtered.
_LOGITS_FP32 = 2


@frozen
class StepWidths:
    """What a step holds, in bytes. token: of the widest layer and the stream beside it, for each
    token. stream: of a token's hidden state. row: of a row's logits.
    """

    token: int
    stream: int
    row: int

    def step(self, tokens: int, rows: int) -> int:
        """Return the activations of a step: the widest layer, or the logits of all rows."""
        return max(tokens * self.token, self.logits(rows) + tokens * self.stream)

    def logits(self, rows: int) -> int:
        """Return the bytes of the logits of `rows`."""
        return rows * self.row


def step_widths(shared: Shared) -> StepWidths:
    """Return what the layers of a model add to a step, from their shapes.

    A layer has its input and its output in memory, beside the stream.
    """
    size = shared.dtype.itemsize
    widest = stream = row = 0
    for unit in shared.units:
        spec = getattr(unit.module, "spec", None)
        if not isinstance(spec, LinearSpec):
            continue
        if spec.kind is LinearKind.LM_HEAD:
            whole = sum(shard.total for shard in spec.shards)
            row = whole * (size + _LOGITS_FP32 * torch.float32.itemsize)
        if spec.kind in (LinearKind.EMBEDDING, LinearKind.LM_HEAD):
            stream = max(stream, spec.inputs)
        else:
            widest = max(widest, spec.inputs + spec.outputs)
    return StepWidths((widest + _STREAM * stream) * size, stream * size, row)


def step_bytes(widths: StepWidths, config: EngineConfig) -> int:
    """Return the activations of the largest step."""
    tokens = int(config.scheduler.max_num_batched_tokens or 1)
    return widths.step(tokens, min(int(config.scheduler.max_num_seqs or 1), tokens))
