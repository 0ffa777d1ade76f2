"""A model run by hand: loads a checkpoint and steps it over rows, without scheduler or sampler.

What the kits compare is the model's own arithmetic, on the engine's real batches and caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from modulm.config import EngineConfig
from modulm.contracts.executor import Plan
from modulm.engine.kv_cache.sizing import allocate
from modulm.engine.worker.input_batch import BatchBuilder, GroupPlanner
from modulm.loading import Loaded, load_model, open_checkpoint
from modulm.plugins import manager

if TYPE_CHECKING:
    from modulm.contracts.platform import Platform

__all__ = ["Session"]


class Session:
    """A loaded model with caches for `rows` sequences whose blocks lie in random order.

    Flags are those of EngineConfig. A row starts anew after `release`, in the same blocks, with
    whatever they hold.
    """

    def __init__(self, path: str | Path, *, rows: int = 4, seed: int = 0, **flags: Any) -> None:
        self.config = EngineConfig.from_keywords(model=str(path), **flags)
        plugins = manager.current()
        name = self.config.device.device
        self.platform: Platform = plugins.load("platforms", "cpu" if name == "auto" else name)()
        checkpoint = open_checkpoint(self.config, plugins)
        self.loaded: Loaded = load_model(self.config, checkpoint, self.platform, plugins)
        self.model = self.loaded.model
        self.done = np.zeros(rows, dtype=np.int32)
        length = self.loaded.max_model_len
        order = np.random.default_rng(seed)
        self._tables: list[np.ndarray] = []
        for group in self.loaded.groups:
            each = -(-length // group.block_size)
            blocks = 1 + order.permutation(rows * each).astype(np.int32)
            self._tables.append(blocks.reshape(rows, each))
        counts = [1 + table.size for table in self._tables]
        caches, owners = allocate(self.model.caches, self.loaded.groups, counts, self.platform)
        self._builder = BatchBuilder(
            GroupPlanner.all(self.loaded.groups),
            caches,
            owners,
            rows=rows,
            tokens=rows * length,
            platform=self.platform,
        )

    @torch.inference_mode()
    def step(self, work: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Run the next tokens of some rows: row -> log probabilities [tokens, vocabulary] fp32."""
        return {
            row: self.model.logits(hidden).float().log_softmax(-1).cpu()
            for row, hidden in self.hidden(work).items()
        }

    @torch.inference_mode()
    def hidden(self, work: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Run the next tokens of some rows: row -> hidden states [tokens, hidden]."""
        rows = np.array(list(work), dtype=np.int32)
        counts = np.array([len(tokens) for tokens in work.values()], dtype=np.int32)
        starts = self.done[rows]
        plan = Plan(
            step=0,
            rows=rows,
            starts=starts,
            counts=counts,
            tokens=np.concatenate([np.asarray(t, dtype=np.int64) for t in work.values()]),
            tables=tuple(self._table(i, rows, starts) for i in range(len(self._tables))),
            samples=np.ones(len(rows), dtype=bool),
        )
        places = np.cumsum(counts) - 1
        hidden = self.model.forward(self._builder.build(plan, places))
        self.done[rows] += counts
        return dict(zip(work, torch.split(hidden, counts.tolist()), strict=True))

    def release(self, row: int) -> None:
        """The row's sequence is over; the next step on it starts at position 0."""
        self.done[row] = 0

    def greedy(
        self, prompts: Mapping[int, Sequence[int]], count: int, *, chunk: int | None = None
    ) -> dict[int, tuple[list[int], torch.Tensor]]:
        """Continue each prompt by `count` best tokens; `chunk` cuts prompts into such pieces.

        row -> (the new tokens, log probabilities [prompt + count - 1, vocabulary]).
        """
        pieces: dict[int, list[torch.Tensor]] = {row: [] for row in prompts}
        left = {row: list(prompt) for row, prompt in prompts.items()}
        made: dict[int, list[int]] = {row: [] for row in prompts}
        while left:
            work = {row: tokens[: chunk or len(tokens)] for row, tokens in left.items()}
            for row, logprobs in self.step(work).items():
                pieces[row].append(logprobs)
                left[row] = left[row][len(work[row]) :]
                if not left[row]:
                    made[row].append(int(logprobs[-1].argmax()))
                    left[row] = made[row][-1:]
                if len(made[row]) == count:
                    del left[row]
        return {row: (made[row], torch.cat(pieces[row])) for row in prompts}

    def _table(self, index: int, rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """The rows' block tables; blocks that have left a window are the null block."""
        table: np.ndarray = self._tables[index][rows].copy()
        group = self.loaded.groups[index]
        if group.window is not None:
            gone = np.maximum(starts - group.window + 1, 0) // group.block_size
            table[np.arange(table.shape[1]) < gone[:, None]] = 0
        return table
