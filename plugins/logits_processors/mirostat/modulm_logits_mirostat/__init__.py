"""Mirostat (Basu et al., arXiv 2007.14966): keeps the surprise of generated tokens at a target.

`mirostat` 1 estimates the distribution's exponent and keeps the k best tokens; `mirostat` 2 keeps
tokens whose surprise in bits is below a bound. After each token the bound changes by `mirostat_eta`
times the difference between the token's surprise and `mirostat_tau`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, frozen

from modulm.contracts.sampling import RowView
from modulm_samplers import SettingsProcessor, number

if TYPE_CHECKING:
    import torch

__all__ = ["Mirostat", "bound_after", "size_of"]

#: Number of best tokens from which version 1 estimates the exponent.
_ESTIMATED = 100
#: Maximum number of preempted rows whose bounds are kept.
_KEPT = 1024


@frozen(kw_only=True)
class _Settings:
    """mirostat: the version, 1 or 2; 0 disables it. mirostat_tau: the target, in bits."""

    mirostat: int = number(0, least=0, most=2, whole=True)
    mirostat_tau: float = number(5.0, least=0, most=100)
    mirostat_eta: float = number(0.1, least=0, most=1)

    @property
    def active(self) -> bool:
        return self.mirostat > 0


@define(eq=False)
class _State:
    """A row's bound in bits for the answer's token at index `length`, and the surprise in bits of
    the candidates there, once computed.
    """

    view: RowView
    bound: float
    length: int
    surprise: torch.Tensor | None = None


class Mirostat(SettingsProcessor[_Settings]):
    """Removes tokens that exceed the row's bound of surprise. The best one is always kept."""

    settings = _Settings

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        super().__init__(vocabulary, device)
        self._states: dict[int, _State] = {}
        self._left: OrderedDict[bytes, float] = OrderedDict()

    def admit(self, view: RowView) -> bool:
        if not super().admit(view):
            return False
        # A preempted row continues with its bound.
        start = 2 * self.rows[view.row].mirostat_tau
        bound = self._left.pop(_key(view), start) if len(view.output) else start
        self._states[view.row] = _State(view, bound, len(view.output))
        return True

    def release(self, row: int) -> None:
        state = self._states.pop(row, None)
        if state is not None and len(state.view.output):
            self._advance(state)
            self._left[_key(state.view)] = state.bound
            while len(self._left) > _KEPT:
                self._left.popitem(last=False)
        super().release(row)

    def apply_row(self, view: RowView, logits: torch.Tensor) -> torch.Tensor:
        state, settings = self._states[view.row], self.rows[view.row]
        self._advance(state)
        state.length = len(view.output)
        surprise = logits.log_softmax(0) / -math.log(2)
        if settings.mirostat == 1:
            count = size_of(surprise, state.bound)
            least = surprise.topk(count, largest=False).values[-1]
            left_out = surprise > least
        else:
            left_out = surprise > state.bound
        left_out[surprise.argmin()] = False
        logits.masked_fill_(left_out, float("-inf"))
        kept = logits.log_softmax(0) / -math.log(2)
        state.surprise = surprise if settings.mirostat == 1 else kept
        return logits

    def _advance(self, state: _State) -> None:
        """Update the bound by the token that was chosen since, if any."""
        if state.surprise is None or len(state.view.output) != state.length + 1:
            return
        settings = self.rows[state.view.row]
        observed = float(state.surprise[state.view.output[-1]])
        state.bound = bound_after(
            state.bound, observed, settings.mirostat_tau, settings.mirostat_eta
        )
        state.surprise, state.length = None, len(state.view.output)


def bound_after(bound: float, observed: float, target: float, rate: float) -> float:
    """Compute the bound after a token with a surprise of `observed` bits."""
    return bound - rate * (observed - target)


def size_of(surprise: torch.Tensor, bound: float) -> int:
    """Compute how many of the best tokens version 1 keeps. surprise: [tokens], in bits.

    Estimates the exponent of Zipf's law from the best tokens, and returns the number of tokens
    whose expected surprise is `bound`.
    """
    import torch

    best = surprise.topk(min(_ESTIMATED, len(surprise)), largest=False).values.double()
    best = best[best.isfinite()] * math.log(2)
    places = torch.arange(1, len(best) + 1, dtype=torch.float64, device=best.device)
    ratios, falls = (places[1:] / places[:-1]).log(), best.diff()
    exponent = float((ratios * falls).sum() / (ratios * ratios).sum()) if len(falls) else 1.0
    tokens = len(surprise)
    excess = exponent - 1
    if abs(excess) < 1e-9 or exponent <= 0:
        size = 2.0**bound if exponent > 0 else float(tokens)
    else:
        part = excess * 2.0**bound / (1 - tokens ** (-excess))
        size = part ** (1 / exponent) if part > 0 else 1.0
    return int(min(max(round(size), 1), tokens))


def _key(view: RowView) -> bytes:
    """The identity of a preempted row."""
    parts = (np.asarray(view.prompt, np.int64), np.asarray(view.output, np.int64))
    text = repr(view.params.extra_args).encode() + b"|".join(part.tobytes() for part in parts)
    return blake2b(text, digest_size=16).digest()
