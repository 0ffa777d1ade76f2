"""Log probabilities of prompt tokens, for rows with `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch

    from modulm.contracts.executor import Plan, RowStart
    from modulm.contracts.sampling import SamplingParams
    from modulm.engine.sampling.sampler import Best, Sampler

__all__ = ["PromptScorer"]

#: Number of prompt positions whose logits are in memory at once.
_SLICE = 64

#: (hidden states [n, hidden], rows [n], positions [n]) -> [n, vocabulary].
Logits: TypeAlias = "Callable[[torch.Tensor, np.ndarray, np.ndarray], torch.Tensor]"


class PromptScorer:
    """Scores the prompts of rows with `prompt_logprobs`. send: copies an array to the device."""

    def __init__(
        self, sampler: Sampler, logits: Logits, send: Callable[[np.ndarray], torch.Tensor]
    ) -> None:
        self._sampler = sampler
        self._logits = logits
        self._send = send
        self._prompts: dict[int, tuple[np.ndarray, int]] = {}

    def admit(self, start: RowStart, params: SamplingParams) -> None:
        """Start a row; rows without `prompt_logprobs` are ignored."""
        if params.prompt_logprobs is not None:
            self._prompts[start.row] = (start.prompt, params.prompt_logprobs)

    def release(self, row: int) -> None:
        """Forget the row; unknown rows are ignored."""
        self._prompts.pop(row, None)

    @property
    def busy(self) -> bool:
        """Whether a row's prompt is being scored."""
        return bool(self._prompts)

    def scores(self, plan: Plan, hidden: torch.Tensor) -> dict[int, list[Best]]:
        """Score, for each row, the prompt tokens that follow those computed in the step.

        hidden: [tokens, hidden] of the step.
        """
        if not self._prompts:
            return {}
        scores: dict[int, list[Best]] = {}
        ends = np.cumsum(plan.counts)
        for i, row in enumerate(plan.rows.tolist()):
            if row not in self._prompts:
                continue
            prompt, k = self._prompts[row]
            start, count = int(plan.starts[i]), int(plan.counts[i])
            targets = prompt[start + 1 : start + 1 + count]
            if len(targets):
                states = hidden[ends[i] - count :][: len(targets)]
                scores[row] = self._score(states, targets, k, row, start)
        return scores

    def _score(
        self, hidden: torch.Tensor, targets: np.ndarray, k: int, row: int, start: int
    ) -> list[Best]:
        """Score `targets`, [n], the tokens after those of `hidden`, [n, hidden], from `start` on.

        k: -1 for the whole vocabulary.
        """
        count = self._sampler.vocabulary if k == -1 else k
        tokens = self._send(np.array(targets))
        rows = np.full(len(targets), row)
        positions = start + np.arange(len(targets))
        slices = [slice(at, at + _SLICE) for at in range(0, len(targets), _SLICE)]
        return [
            self._sampler.best(
                self._logits(hidden[part], rows[part], positions[part]).float(), tokens[part], count
            )
            for part in slices
        ]
