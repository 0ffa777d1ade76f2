"""Run a model by hand: load a checkpoint and step it over rows, without scheduler or sampler.

The contract kits use it to compare the model's arithmetic on the engine's real batches and caches.
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
    """A loaded model with caches for `rows` sequences, whose blocks are in random order.

    Flags are those of EngineConfig. After `release`, a row starts anew in the same blocks, which
    keep their content.
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
        last_tokens = np.cumsum(counts) - 1
        hidden = self.model.forward(self._builder.build(plan, last_tokens))
        self.done[rows] += counts
        return dict(zip(work, torch.split(hidden, counts.tolist()), strict=True))

    def release(self, row: int) -> None:
        """End the row's sequence; its next step starts at position 0."""
        self.done[row] = 0

    def greedy(
        self, prompts: Mapping[int, Sequence[int]], count: int, *, chunk: int | None = None
    ) -> dict[int, tuple[list[int], torch.Tensor]]:
        """Continue each prompt by `count` greedy tokens. chunk: tokens of a prompt per step.

        Returns row -> (new tokens, log probabilities [prompt + count - 1, vocabulary]).
        """
        pieces: dict[int, list[torch.Tensor]] = {row: [] for row in prompts}
        remaining = {row: list(prompt) for row, prompt in prompts.items()}
        generated: dict[int, list[int]] = {row: [] for row in prompts}
        while remaining:
            work = {row: tokens[: chunk or len(tokens)] for row, tokens in remaining.items()}
            for row, logprobs in self.step(work).items():
                pieces[row].append(logprobs)
                remaining[row] = remaining[row][len(work[row]) :]
                if not remaining[row]:
                    generated[row].append(int(logprobs[-1].argmax()))
                    remaining[row] = generated[row][-1:]
                if len(generated[row]) == count:
                    del remaining[row]
        return {row: (generated[row], torch.cat(pieces[row])) for row in prompts}

    def _table(self, index: int, rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return the rows' block tables; blocks outside the window are the null block."""
        table: np.ndarray = self._tables[index][rows].copy()
        group = self.loaded.groups[index]
        if group.window is not None:
            expired = np.maximum(starts - group.window + 1, 0) // group.block_size
            table[np.arange(table.shape[1]) < expired[:, None]] = 0
        return table
