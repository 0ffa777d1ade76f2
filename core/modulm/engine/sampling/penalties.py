"""Penalties: the tokens that a row has seen, as sparse counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from modulm.contracts.kernels import Ops
from modulm.contracts.sampling import SamplingParams

__all__ = ["Seen", "penalise", "wants_penalties"]

#: Lower bound of repetition penalties, so that logits divided by it stay finite.
_LEAST_REPETITION = 1e-6


def wants_penalties(params: SamplingParams) -> bool:
    """Whether any of the three penalties has an effect."""
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


class Seen:
    """Distinct tokens of one row and their counts in the output.

    Prompt tokens are included, with count 0, only for the repetition penalty.
    """

    def __init__(
        self, params: SamplingParams, prompt: np.ndarray, output: Sequence[int], vocabulary: int
    ) -> None:
        self.penalties = (
            max(params.repetition_penalty, _LEAST_REPETITION),
            params.frequency_penalty,
            params.presence_penalty,
        )
        ids = np.unique(prompt) if params.repetition_penalty != 1.0 else prompt[:0]
        ids = ids[(ids >= 0) & (ids < vocabulary)]
        self.size = len(ids)
        self._ids = np.zeros(max(64, 2 * self.size), dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._ids[: self.size] = ids
        self._slot = {token: slot for slot, token in enumerate(ids.tolist())}
        for token in output:
            self.add(token)

    @property
    def ids(self) -> np.ndarray:
        """The distinct tokens: [size] int64."""
        return self._ids[: self.size]

    @property
    def counts(self) -> np.ndarray:
        """Their counts in the output: [size] float32."""
        return self._counts[: self.size]

    def add(self, token: int) -> None:
        """Count a token of the output."""
        slot = self._slot.get(token)
        if slot is None:
            slot = self._slot[token] = self.size
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token
            self.size += 1
        self._counts[slot] += 1


def penalise(ops: Ops, logits: torch.Tensor, places: Sequence[int], rows: Sequence[Seen]) -> None:
    """Apply the penalties of `rows` in place to `logits[places]`: [n, vocabulary] fp32."""
    device = logits.device
    sizes = [seen.size for seen in rows]
    numbers = np.array([seen.penalties for seen in rows], dtype=np.float32)
    repetition, frequency, presence = np.repeat(numbers, sizes, axis=0).T.copy()
    ops.apply_penalties(
        logits,
        torch.from_numpy(np.repeat(np.array(places, dtype=np.int64), sizes)).to(device),
        torch.from_numpy(np.concatenate([seen.ids for seen in rows])).to(device),
        torch.from_numpy(np.concatenate([seen.counts for seen in rows])).to(device),
        torch.from_numpy(repetition).to(device),
        torch.from_numpy(frequency).to(device),
        torch.from_numpy(presence).to(device),
    )
