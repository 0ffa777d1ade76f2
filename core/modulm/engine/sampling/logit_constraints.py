"""Logit constraints: changes to a row's logits by its parameters, created on admission.

They run before the penalties, in this order: allowed ids, bad words, minimum length, bias.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from modulm.contracts.executor import RowStart
from modulm.contracts.sampling import SamplingParams

__all__ = ["AllowedIds", "BadWords", "Bias", "LogitConstraint", "MinTokens", "constraints_of"]


class LogitConstraint(ABC):
    """Changes the logits of one row in place."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, output: Sequence[int]) -> None:
        """Change logits: [vocabulary] fp32. output: the row's tokens so far, without the prompt."""

    def over(self, output: Sequence[int]) -> bool:
        """Whether the constraint has no effect from now on."""
        return False


class AllowedIds(LogitConstraint):
    """Allows only the given tokens."""

    def __init__(self, ids: Sequence[int], device: torch.device) -> None:
        self.ids = torch.tensor(ids, device=device)

    def apply(self, logits: torch.Tensor, output: Sequence[int]) -> None:
        allowed = logits[self.ids]
        logits.fill_(-torch.inf)
        logits[self.ids] = allowed


class BadWords(LogitConstraint):
    """Forbids tokens that would complete one of the token sequences."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self.always = [word[0] for word in words if len(word) == 1]
        self.longer = [word for word in words if len(word) > 1]

    def apply(self, logits: torch.Tensor, output: Sequence[int]) -> None:
        longest = max((len(word) for word in self.longer), default=1) - 1
        tail = tuple(output[-longest:]) if longest else ()
        ends = [w[-1] for w in self.longer if tail[len(tail) - len(w) + 1 :] == w[:-1]]
        logits[self.always + ends] = -torch.inf


class MinTokens(LogitConstraint):
    """Forbids stop tokens until the output has its minimum length."""

    def __init__(self, least: int, stops: Sequence[int], device: torch.device) -> None:
        self.least = least
        self.stops = torch.tensor(stops, dtype=torch.int64, device=device)

    def apply(self, logits: torch.Tensor, output: Sequence[int]) -> None:
        if len(output) < self.least:
            logits[self.stops] = -torch.inf

    def over(self, output: Sequence[int]) -> bool:
        return len(output) >= self.least


class Bias(LogitConstraint):
    """Adds biases to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float], device: torch.device) -> None:
        self.ids = torch.tensor([int(token) for token in bias], device=device)
        self.values = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)

    def apply(self, logits: torch.Tensor, output: Sequence[int]) -> None:
        logits[self.ids] += self.values


def constraints_of(
    start: RowStart, params: SamplingParams, device: torch.device
) -> list[LogitConstraint]:
    """Create the constraints of a row's parameters, in the order in which they run."""
    constraints: list[LogitConstraint] = []
    if params.allowed_token_ids is not None:
        constraints.append(AllowedIds(params.allowed_token_ids, device))
    if start.bad_words:
        constraints.append(BadWords(start.bad_words))
    if params.min_tokens > len(start.output) and start.stop_ids:
        constraints.append(MinTokens(params.min_tokens, start.stop_ids, device))
    if params.logit_bias:
        constraints.append(Bias(params.logit_bias, device))
    return constraints
