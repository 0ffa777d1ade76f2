"""Bytes of a step's activations: rehearsed, or from the widths of a model's layers."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from modulm.contracts.model import StateSpec
from modulm.contracts.quantization import LinearKind, LinearSpec
from modulm.nn.norm import LayerNorm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.model import CacheSpec
    from modulm.nn.builder import Shared
    from modulm_memory.rehearsal import Growth

__all__ = ["StepWidths", "step_bytes", "step_widths"]

#: Tensors as wide as the stream that are alive beside what a layer computes: the residual, its
#: normalized copy, and the layer's input; a sum as well where norms do not add the residual.
_STREAMS, _UNFUSED_STREAMS = 3, 4
#: Inner values of recurrent blocks, in fp32 beside the dtype of the model.
_INNER = 3
#: Copies of the logits while tokens are chosen: as computed, in fp32, and filtered.
_LOGITS_FP32 = 2


@frozen
class StepWidths:
    """What a step holds, in bytes. token: of the widest layer and the stream beside it, for each
    token. stream: of a token's hidden state. row: of a row's logits. encoder: of the widest layer
    of an encoder, for each of its rows. growth: as rehearsed, in place of `token`.
    """

    token: int
    stream: int
    row: int
    encoder: int = 0
    growth: Growth | None = None

    def step(self, tokens: int, rows: int, context: int | None = None) -> int:
        """Return the activations of a step: of the layers, or of the logits of all rows.

        context: tokens of a sequence so far, by default those of the step.
        """
        layers = tokens * self.token
        if self.growth is not None:
            layers = self.growth.at(tokens, context)
        return max(layers, self.logits(rows) + tokens * self.stream)

    def logits(self, rows: int) -> int:
        """Return the bytes of the logits of `rows`."""
        return rows * self.row


def step_widths(shared: Shared, caches: Sequence[CacheSpec], decoder: str) -> StepWidths:
    """Return what the layers of a model add to a step, from their shapes.

    caches: of the model. decoder: path of the module that contains the layers with caches.
    """
    size = shared.dtype.itemsize
    blocks: dict[str, list[LinearSpec]] = {}
    stream = row = 0
    streams = _STREAMS
    for unit in shared.units:
        if isinstance(unit.module, LayerNorm) and unit.path.startswith(decoder):
            streams = _UNFUSED_STREAMS
        spec = getattr(unit.module, "spec", None)
        if not isinstance(spec, LinearSpec):
            continue
        if spec.kind is LinearKind.LM_HEAD:
            whole = sum(shard.total for shard in spec.shards)
            row = whole * (size + _LOGITS_FP32 * torch.float32.itemsize)
        if spec.kind in (LinearKind.EMBEDDING, LinearKind.LM_HEAD):
            stream = max(stream, spec.inputs)
        else:
            blocks.setdefault(unit.path.rpartition(".")[0], []).append(spec)
    widths = {path: _block(path, specs, caches) for path, specs in blocks.items()}
    encoders = [width for path, width in widths.items() if not path.startswith(decoder)]
    widest = max(widths.values(), default=0)
    return StepWidths(
        token=(widest + streams * stream) * size,
        stream=stream * size,
        row=row,
        encoder=max(encoders, default=0) * size,
    )


def _block(path: str, specs: Sequence[LinearSpec], caches: Sequence[CacheSpec]) -> int:
    """Return the values per token of a block of linear layers: the most of one's output and the
    next one's input.

    Attention has its queries twice, as computed and with positions; with a compressed cache also in
    its space, as their results. A recurrent block has what all its layers read and write, and its
    inner values in fp32.
    """
    pairs = [first.outputs + second.inputs for first, second in pairwise(specs)]
    width = max([*pairs, *(spec.inputs + spec.outputs for spec in specs)])
    for cache in caches:
        if cache.layer != path and not cache.layer.startswith(f"{path}."):
            continue
        if isinstance(cache.spec, StateSpec):
            inner = max(spec.inputs for spec in specs)
            return sum(spec.inputs + spec.outputs for spec in specs) + _INNER * inner
        if latent := cache.spec.latent:
            spaces = cache.spec.heads * (cache.spec.head_dim + latent)
            return 2 * specs[0].outputs + specs[-1].inputs + spaces + specs[0].inputs
        return width + specs[-1].inputs
    return width


def step_bytes(widths: StepWidths, config: EngineConfig, context: int) -> int:
    """Return the activations of the largest step. context: tokens of the longest sequence."""
    tokens = int(config.scheduler.max_num_batched_tokens or 1)
    rows = min(int(config.scheduler.max_num_seqs or 1), tokens)
    return max(widths.step(tokens, rows, context), tokens * widths.encoder)
