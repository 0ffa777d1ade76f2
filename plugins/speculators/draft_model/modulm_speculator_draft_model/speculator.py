"""Draft tokens with a smaller model (Leviathan et al., arXiv 2211.17192).

Its keys and values are stored in the target's blocks, so prefix-cache hits cover both models.
Nothing is computed until drafts are requested; then the draft model catches up on the tokens of a
row that it has not seen, at most a step's token budget at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
import torch
from attrs import evolve, frozen

from modulm.contracts.drafter import DraftStep, Needs, Runs
from modulm.errors import ConfigError
from modulm_speculation import Options, Target
from modulm_speculation.chain import ModelSpeculator, ends_of
from modulm_speculation.computed import Computed
from modulm_speculation.draft_model import DraftModel, DraftOptions, load_draft
from modulm_speculation.speculator import Branch
from modulm_speculation.vocabulary import check_vocabulary

__all__ = ["DraftModelOptions", "DraftModelSpeculator"]


@frozen
class DraftModelOptions(DraftOptions):
    """Options of the draft model. max_model_len: as the flag; others: see `DraftOptions`."""

    max_model_len: int | None = None
    needs_model: ClassVar[str] = "draft_model needs the path or hub id of a model"


class DraftModelSpeculator(ModelSpeculator):
    """Drafts tokens with a smaller model."""

    name: ClassVar[str] = "draft_model"
    Config: ClassVar[type] = DraftModelOptions
    needs: ClassVar[Needs] = Needs(histories=True, every=True)

    def __init__(self, config: DraftModelOptions, draft: DraftModel, budget: int) -> None:
        super().__init__(config, draft)
        self._budget, self._vocabulary = budget, draft.loaded.vocabulary
        self._computed = Computed()
        #: Row -> tokens known when its last drafts were made, and these drafts, with `trees`.
        self._last: dict[int, tuple[int, np.ndarray]] = {}

    @classmethod
    def open(cls, config: Options, target: Target) -> Self:
        if not isinstance(config, DraftModelOptions):
            raise ConfigError("method", "draft_model has options of its own")
        weights = config.weights(max_model_len=config.max_model_len)
        draft = load_draft(target, weights)
        check_vocabulary(target, draft)
        return cls(config, draft, target.config.scheduler.max_num_batched_tokens or 1)

    def admit(self, row: int, prompt: int, salt: str | None) -> None:
        self.release(row)

    def release(self, row: int) -> None:
        self._computed.release(row)
        self._last.pop(row, None)

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        table, size = step.tables[self.draft.lead], step.sizes[self.draft.lead]
        self._computed.ran(step.ran, table, size)
        drafts = [np.zeros(0, dtype=np.int64)] * len(step.rows)
        branches: list[Sequence[Branch]] = [()] * len(step.rows)
        if self.trees:
            self._forget_others(step)
        self._branches = branches
        parts = self._missing(step)
        if not parts:
            return drafts
        states = self._catch_up(step, parts)
        ready = [at for at, part in enumerate(parts) if part.whole]
        rows = [parts[at].place for at in ready]
        asked = evolve(
            step, rows=[step.rows[at] for at in rows], most=[step.most[at] for at in rows]
        )
        first = states[torch.tensor(ready, dtype=torch.int64)] if rows else states
        proposals = self.follow(asked, first, ends_of(asked), 1) if rows else []
        for at, (index, tokens) in enumerate(zip(rows, proposals, strict=True)):
            drafts[index] = tokens
            if self.trees:
                branches[index] = self._branches[at]
                self._last[step.rows[index]] = len(step.histories[index]), tokens
        self._branches = branches
        places = {row: index for index, row in enumerate(step.ran.rows.tolist())}
        for part in parts:
            row, known = step.rows[part.place], len(step.histories[part.place])
            count = part.end + max(len(drafts[part.place]) - 1, 0)
            self._computed.put(row, count, known, table[places[row]], size)
        return drafts

    def _forget_others(self, step: DraftStep) -> None:
        """Compute again what follows an accepted branch: the caches have the draft beside it."""
        for row, history in zip(step.rows, step.histories, strict=True):
            known, tokens = self._last.pop(row, (0, history[:0]))
            came = history[known : known + len(tokens)]
            same = came == tokens[: len(came)]
            self._computed.cut(row, known + (len(came) if same.all() else int(same.argmin())))

    def _missing(self, step: DraftStep) -> list[_Part]:
        """Return the tokens to run before drafting, within the budget."""
        parts, remaining = [], self._budget
        for index, (row, history) in enumerate(zip(step.rows, step.histories, strict=True)):
            if step.most[index] and remaining and len(history) <= self.draft.max_length:
                start = self._computed.count(row, len(history))
                tokens = history[start : start + remaining]
                remaining -= len(tokens)
                parts.append(_Part(index, start, tokens, start + len(tokens) == len(history)))
        return parts

    def _catch_up(self, step: DraftStep, parts: Sequence[_Part]) -> torch.Tensor:
        """Run the parts: [parts, hidden], the state after the last token of each."""
        runs = Runs(
            np.array([step.rows[part.place] for part in parts]),
            np.array([part.start for part in parts]),
            np.array([len(part.tokens) for part in parts], dtype=np.int32),
            np.concatenate([part.tokens for part in parts]).clip(max=self._vocabulary - 1),
        )
        states = self.run(step.build_batch(runs), torch.empty(0), 0)[: len(runs.tokens)]
        return states if len(states) == len(parts) else states[torch.from_numpy(runs.lasts)]


@frozen(eq=False)
class _Part:
    """Tokens of a row to catch up on.

    place: index of the row in the step. whole: no token is missing after these.
    """

    place: int
    start: int
    tokens: np.ndarray
    whole: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)
