"""Adaptive draft lengths.

Step times by number of tokens and acceptance rates are measured. The draft length that maximizes
tokens per second is used; it is 0 if a larger batch makes drafting a loss.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from attrs import evolve

from modulm.contracts.drafter import Drafter, DraftStep, Needs
from modulm_speculation.speculator import Speculator

if TYPE_CHECKING:
    from modulm.contracts.attention import AttentionBackend, AttentionSpec
    from modulm.contracts.model import CacheSpec

__all__ = ["Adaptive", "StepTimes"]

#: Weight of new values in moving averages.
_NEW = 0.2
#: Weight of the acceptance rate of all rows in that of one row, in drafted tokens.
_PRIOR = 4.0
#: Initial acceptance rate.
_GUESS = 0.6
#: Steps without drafts until a drafter that is not cheap is tried again.
_PAUSE = 64
#: Steps that took this many times the usual time are ignored.
_OUTLIER = 4.0


class StepTimes:
    """Step times in seconds by number of tokens, interpolated between measurements.

    Outside the measured range estimates are optimistic, so that the size is tried: time is
    proportional for fewer tokens, constant for more.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._times: dict[int, float] = {}

    def add(self, tokens: int, seconds: float) -> None:
        """Record the time of a step."""
        known = self._times.get(tokens)
        if known is None:
            self._sizes.insert(bisect_left(self._sizes, tokens), tokens)
            self._times[tokens] = seconds
            return
        self._times[tokens] += _NEW * (min(seconds, _OUTLIER * known) - known)

    def of(self, tokens: int) -> float:
        """Estimate the time of a step of this many tokens; 0 without measurements."""
        index = bisect_left(self._sizes, tokens)
        around = self._sizes[max(index - 1, 0) : index + 1]
        if not around:
            return 0.0
        share = min(tokens / around[0], 1.0)
        return share * float(np.interp(tokens, around, [self._times[size] for size in around]))


class _Row:
    """A row's last proposal, and its counts of accepted drafts."""

    def __init__(self) -> None:
        self.length = 0
        self.proposed = np.zeros(0, dtype=np.int64)
        self.right = self.tried = 0.0


class Adaptive(Drafter):
    """Wraps a speculator to draft the most profitable number of tokens. clock: in seconds."""

    name: ClassVar[str] = "adaptive"
    api: ClassVar[int | tuple[int, int]] = 1

    def __init__(self, speculator: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(speculator.config)
        self._speculator = speculator
        self._cheap = isinstance(speculator, Speculator) and speculator.cheap
        self._clock = clock
        self.most = speculator.most
        self.times = StepTimes()
        self._rows: dict[int, _Row] = {}
        # By index in a proposal, over all rows: accepted drafts, and drafts that were compared.
        self._right, self._tried = np.zeros(self.most), np.zeros(self.most)
        self._began: float | None = None
        self._last: tuple[int, ...] = ()
        self._idle = 0

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """The speculator's needs, plus histories."""
        return evolve(self._speculator.needs, histories=True)

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return self._speculator.caches

    @property
    def backends(self) -> Mapping[AttentionSpec, AttentionBackend]:
        return self._speculator.backends

    def admit(self, row: int, prompt: int, salt: str | None) -> None:
        self._rows[row] = _Row()
        self._speculator.admit(row, prompt, salt)

    def release(self, row: int) -> None:
        self._rows.pop(row, None)
        self._speculator.release(row)

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        if not step.rows:
            return self._speculator.propose(step)
        self._measure(step)
        rows = [self._rows.setdefault(row, _Row()) for row in step.rows]
        for row, history in zip(rows, step.histories, strict=True):
            self._learn(row, history)
        if self._cheap:
            proposed = self._speculator.propose(step)
            most = self._limit(rows, [len(each) for each in proposed])
        else:
            most = self._limit(rows, step.most)
            limited = evolve(step, most=[min(most, each) for each in step.most])
            proposed = self._speculator.propose(limited)
        for row, history, tokens in zip(rows, step.histories, proposed, strict=True):
            row.length, row.proposed = len(history), np.asarray(tokens)
        return [tokens[:most] for tokens in proposed]

    def _measure(self, step: DraftStep) -> None:
        """Record the time since the last step started, if it decoded the same rows."""
        now, rows = self._clock(), tuple(step.rows)
        if self._began is not None and rows == self._last:
            self.times.add(len(step.batch.tokens), now - self._began)
        self._began, self._last = now, rows

    def _learn(self, row: _Row, history: np.ndarray) -> None:
        """Count which tokens proposed for a row were generated."""
        came = history[row.length :][: len(row.proposed)]
        if not len(came):
            return
        same = came == row.proposed[: len(came)]
        right = len(came) if same.all() else int(same.argmin())
        tried = min(right + 1, len(came))
        row.right += right - _NEW * row.right
        row.tried += tried - _NEW * row.tried
        self._right -= _NEW * self._right
        self._tried -= _NEW * self._tried
        self._right[:right] += 1
        self._tried[:tried] += 1

    def _limit(self, rows: Sequence[_Row], lengths: Sequence[int]) -> int:
        """Return the draft limit for all rows. lengths: maximum drafts of each row."""
        usual = (self._right + _GUESS) / (self._tried + 1)
        mean = (self._right.sum() + _GUESS) / (self._tried.sum() + 1)
        rates = [(row.right + _PRIOR * mean) / (row.tried + _PRIOR) for row in rows]
        better = np.array(rates) / mean
        lengths_array, tokens, expected = np.asarray(lengths), len(rows), float(len(rows))
        best, rate, alive = 0, 0.0, np.ones(len(rows))
        for most in range(self.most + 1):
            if most:
                going = lengths_array >= most
                tokens += int(going.sum())
                alive *= np.minimum(usual[most - 1] * better, 1.0)
                expected += float(alive[going].sum())
            speed = expected / max(self.times.of(tokens), 1e-9)
            if speed > rate:
                best, rate = most, speed
            if most and not going.any():
                break
        if best or self._cheap:
            self._idle = 0
            return best
        self._idle += 1
        return int(self._idle % _PAUSE == 0)
