"""Worker state of rows that are aligned with a sound, and the alignment matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import define, field
from torch import Tensor
from torch.nn.functional import pad

from modulm.contracts.pooler import RowPooler
from modulm.contracts.sampling import PoolingParams

if TYPE_CHECKING:
    from modulm.contracts.executor import Plan
    from modulm.contracts.kernels import Forward
    from modulm.contracts.model import Batch, Model

__all__ = ["AlignmentRows", "median"]


@define
class _Row:
    """State of a row. first: index of the answer's first token. frames: of the audio. keys: [heads,
    encoder outputs, head_dim]. queries: [heads, tokens, head_dim] per step.
    """

    first: int
    frames: int | None
    keys: Tensor
    queries: list[Tensor] = field(factory=list)


class AlignmentRows(RowPooler):
    """Captures the queries and keys of the alignment heads from their projections, across steps.
    Hidden states are not used.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._heads = [(layer, head) for layer, head in settings["heads"]]
        self._filter = int(settings["filter"])
        self._rows: dict[int, _Row] = {}

    def width(self, hidden: Tensor) -> int:
        return hidden.shape[-1]

    def admit(self, row: int, params: PoolingParams, prompt: np.ndarray) -> None:
        frames = (params.extra_args or {}).get("frames")
        most = frames if isinstance(frames, int) and frames > 0 else None
        self._rows[row] = _Row(params.pool_from, most, torch.empty(0))

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def watched(self, model: Model, forward: Forward, plan: Plan) -> Forward:
        def run(batch: Batch) -> Tensor | tuple[Tensor, ...]:
            with _caught(model, {layer for layer, _ in self._heads}) as caught:
                result = forward(batch)
            self._take(plan, caught, model)
            return result

        return run

    def _take(self, plan: Plan, caught: Mapping[tuple[int, str], Tensor], model: Any) -> None:
        ends = np.cumsum(plan.counts)
        started = int((plan.starts == 0).sum())
        number = 0
        for index, row in enumerate(plan.rows.tolist()):
            start, count = int(plan.starts[index]), int(plan.counts[index])
            mine = self._rows.get(row)
            if start == 0:
                number += 1
                if mine is not None:
                    mine.keys = self._keys(caught, model, number - 1, started)
            if mine is None:
                continue
            # Uses the step in which a token of the answer was read, not the one in which it was
            # sampled.
            skipped = min(max(mine.first - start, 0), count)
            tokens = slice(int(ends[index]) - count + skipped, int(ends[index]))
            mine.queries.append(
                torch.stack([
                    _part(caught[layer, "q"][tokens], model.layers[layer].cross, head)
                    for layer, head in self._heads
                ])
            )  # fmt: skip

    def _keys(
        self, caught: Mapping[tuple[int, str], Tensor], model: Any, number: int, started: int
    ) -> Tensor:
        """[heads, outputs, head_dim] of a row that begins in the step; all of them have audio, with
        equally many outputs.
        """
        keys = []
        for layer, head in self._heads:
            both, cross = caught[layer, "kv"], model.layers[layer].cross
            most = len(both) // started
            rows = both[number * most : (number + 1) * most]
            keys.append(_part(rows[:, : cross.heads * cross.head_dim], cross, head))
        return torch.stack(keys)

    def feed(self, row: int, hidden: Tensor) -> None:
        """Do nothing: the forward pass was captured."""

    def finish(self, rows: Sequence[int]) -> dict[int, np.ndarray]:
        return {row: self._matrix(self._rows[row]) for row in rows}

    def _matrix(self, row: _Row) -> np.ndarray:
        """[tokens, frames], large where a token is likely to be spoken."""
        queries = torch.cat(row.queries, dim=1)
        # One head at a time fits into the CPU cache.
        heads = [self._head(q, k, row.frames) for q, k in zip(queries, row.keys, strict=True)]
        matrix: np.ndarray = torch.stack(heads).mean(0).cpu().numpy()
        return matrix

    def _head(self, queries: Tensor, keys: Tensor, frames: int | None) -> Tensor:
        """[tokens, head_dim], [outputs of the encoder, head_dim] -> [tokens, frames]."""
        scores = queries @ keys.T * queries.shape[-1] ** -0.5
        weights = scores.softmax(-1)[:, :frames]
        mean = weights.mean(0)
        spread = weights.std(0, unbiased=False)
        # With a single token, every value equals the mean.
        return median(((weights - mean) / spread).nan_to_num(0.0, 0.0, 0.0), self._filter)


def median(x: Tensor, width: int) -> Tensor:
    """The median of `width` (odd) neighbours along the last dimension, padded by reflection."""
    beside = width // 2
    if x.shape[-1] <= beside or not beside:
        return x
    mirrored = pad(x, (beside, beside), mode="reflect")
    near = list(mirrored.unfold(-1, width, 1).unbind(-1))
    # Partition the larger half to the end, element by element: faster than a full sort.
    for last in range(width - 1, beside - 1, -1):
        for i in range(last):
            near[i], near[i + 1] = near[i].minimum(near[i + 1]), near[i].maximum(near[i + 1])
    return near[beside]


def _part(x: Tensor, cross: Any, head: int) -> Tensor:
    """[n, heads * head_dim] -> [n, head_dim] of one head, as an fp32 copy."""
    return x[:, head * cross.head_dim : (head + 1) * cross.head_dim].to(torch.float32, copy=True)


@contextmanager
def _caught(model: Any, layers: set[int]) -> Iterator[Mapping[tuple[int, str], Tensor]]:
    """Capture the outputs of these layers' cross-attention projections within this context."""
    caught: dict[tuple[int, str], Tensor] = {}
    hooks = []
    for layer in layers:
        cross = model.layers[layer].cross
        for name, part in (("q", cross.q), ("kv", cross.kv)):
            hooks.append(part.register_forward_hook(partial(_keep, caught, (layer, name))))
    try:
        yield caught
    finally:
        for hook in hooks:
            hook.remove()


def _keep(
    caught: dict[tuple[int, str], Tensor],
    key: tuple[int, str],
    part: Any,
    inputs: Any,
    output: Tensor,
) -> None:
    caught[key] = output
