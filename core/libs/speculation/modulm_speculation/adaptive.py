"""Adaptive draft lengths.

Step times by number of tokens and acceptance rates are measured. Each row gets the draft length
that maximizes the tokens per second of the whole step; it is 0 if drafting is a loss, because the
row's drafts are rejected or because the batch is large.

Looking for drafts takes time, too. In models whose steps are so short that this is noticeable, a
drafter that gains nothing rests, for twice as many steps each time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from attrs import evolve

from modulm.contracts.drafter import Drafter, DraftStep, Needs
from modulm_speculation.speculator import Branch, Speculator

if TYPE_CHECKING:
    from modulm.contracts.attention import AttentionBackend, AttentionSpec
    from modulm.contracts.model import CacheSpec

__all__ = ["Adaptive", "Rests", "StepTimes"]

#: Weight of new values in moving averages.
_NEW = 0.2
#: Weight of the acceptance rates of all rows in those of one row, in drafted tokens.
_PRIOR = 3.0
#: Initial acceptance rate, and its weight in drafts; share of a class's counts that is forgotten
#: with each proposal.
_GUESS, _WEIGHT, _FORGOTTEN = 0.6, 0.5, 0.1
#: Steps without drafts until a drafter that is not cheap is tried again.
_PAUSE = 64
#: Steps that took this many times the usual time are ignored.
_OUTLIER = 4.0
#: Share of a step's time from which on looking for drafts is noticeable.
_NOTICEABLE = 0.01
#: Steps with a search after which is decided whether to rest.
_WINDOW = 12
#: Windows in which drafting is faster after which plain steps are measured again.
_AGAIN = 16
#: Lengths of the first and of the longest rest, in steps.
_SHORT, _LONG = 4, 256
_NOTHING = np.zeros(0, dtype=np.int64)
#: Share of the time of the largest measured step that each further token is taken to cost.
_FURTHER = 0.1
#: What sizes that have run may lose, in steps, until one that has not is tried: its first step,
#: which may be recorded, takes several times as long.
_FIRST = 0.1
#: A size that did not run in this many steps may be forgotten, after twice as many it is.
_AGE = 1024


class StepTimes:
    """Step times in seconds by number of tokens, interpolated between measurements.

    Outside the measured range estimates are optimistic, so that the size is tried: time is
    proportional for fewer tokens, and each further one costs a small share of a step. Old
    measurements are dropped for the same reason: one slow step must not rule out a size forever.
    """

    def __init__(self) -> None:
        # By size: the time, and the step in which it was last measured.
        self._times: dict[int, float] = {}
        self._last: dict[int, int] = {}
        self._sorted: tuple[np.ndarray, np.ndarray] | None = None
        self._count = 0

    def add(self, tokens: int, seconds: float) -> None:
        """Record the time of a step."""
        self._count += 1
        known = self._times.get(tokens, seconds)
        self._times[tokens] = known + _NEW * (min(seconds, _OUTLIER * known) - known)
        self._last[tokens] = self._count
        self._sorted = None
        if self._count % _AGE == 0:
            old = [size for size, last in self._last.items() if last <= self._count - _AGE]
            for size in old:
                del self._times[size], self._last[size]

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """Estimate the times of steps of these many tokens: [n]; 0 without measurements."""
        if not self._times:
            return np.zeros(len(tokens))
        if self._sorted is None:
            known = sorted(self._times.items())
            self._sorted = np.array([size for size, _ in known]), np.array([t for _, t in known])
        sizes, times = self._sorted
        share = np.minimum(tokens / sizes[0], 1.0) + _FURTHER * np.maximum(tokens - sizes[-1], 0)
        estimates: np.ndarray = share * np.interp(tokens, sizes, times)
        return estimates


class Rests:
    """When a drafter rests: its steps are compared with those of its earlier rests.

    search: time that looking for drafts takes in a step, in seconds.
    """

    def __init__(self) -> None:
        self.search = 0.0
        #: Rows -> the times of the latest steps of that many rows in rests.
        self._plain: dict[int, deque[float]] = {}
        self._length, self._left, self._paying = _SHORT, 0, 0
        self._last: tuple[int, float] | None = None
        self._tokens, self._times = 0.0, list[float]()

    def rest(self, rows: int, now: float) -> bool:
        """Whether this step of `rows` rows is one of a rest."""
        if not self._left:
            self._last = None
            return False
        self._left -= 1
        if self._last is not None and self._last[0] == rows:
            times = self._plain.setdefault(rows, deque(maxlen=_WINDOW))
            times.append(now - self._last[1])
        self._last = rows, now
        return True

    def add(self, rows: int, tokens: int, seconds: float) -> None:
        """Add a step with a search. tokens: generated in it. Begins a rest if that is faster."""
        self._tokens += tokens / rows
        self._times.append(seconds)
        if len(self._times) < _WINDOW:
            return
        usual = median(self._times)
        if self.search > _NOTICEABLE * usual:
            took = sum(min(each, _OUTLIER * usual) for each in self._times)
            plain = self._plain.get(rows)
            if not plain or took > self._tokens * median(plain):
                self._left, self._paying = self._length, 0
                self._length = min(2 * self._length, _LONG)
            else:
                self._length = _SHORT
                self._paying += 1
                if self._paying % _AGAIN == 0:  # measure plain steps again
                    self._left = _SHORT
        self._tokens = 0.0
        self._times.clear()


class _Row:
    """A row's last proposal and its class; how many of its drafts were accepted, and how many were
    expected to be.
    """

    def __init__(self) -> None:
        self.length = self.drawn = 0
        self.proposed = _NOTHING
        self.right = self.expected = 0.0
        self.branches: Sequence[Branch] = ()


class _Rates:
    """How often drafts of one class are accepted, by index, if those before were."""

    def __init__(self, most: int, forgotten: float = _FORGOTTEN) -> None:
        self._forgotten = forgotten
        # Accepted drafts, and those that were compared.
        self._right, self._tried = np.zeros(most), np.zeros(most)
        self._rates = np.full(most, _GUESS)

    def add(self, right: int, tried: int) -> None:
        """Count a proposal of which the first `right` of `tried` drafts were accepted."""
        self._right *= 1 - self._forgotten
        self._tried *= 1 - self._forgotten
        self._right[:right] += 1
        self._tried[:tried] += 1
        rate, rates = _GUESS, []
        for accepted, compared in zip(self._right.tolist(), self._tried.tolist(), strict=True):
            rate = (accepted + _WEIGHT * rate) / (compared + _WEIGHT)
            rates.append(rate)
        self._rates = np.array(rates)

    def of(self, count: int) -> np.ndarray:
        """Return the rates of the first drafts: [count]. A draft that was seldom compared has that
        of the draft before it.
        """
        return self._rates[:count]


class Adaptive(Drafter):
    """Wraps a speculator to draft the most profitable number of tokens. clock: in seconds."""

    name: ClassVar[str] = "adaptive"
    api: ClassVar[int | tuple[int, int]] = 1

    def __init__(self, speculator: Drafter, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(speculator.config)
        self.speculator = speculator
        self._cheap = isinstance(speculator, Speculator) and speculator.cheap
        self._clock = clock
        self.most = speculator.most
        self.times = StepTimes()
        self._rows: dict[int, _Row] = {}
        classes = speculator.classes if isinstance(speculator, Speculator) else 1
        self._rates = [_Rates(self.most) for _ in range(classes)]
        #: Sizes of steps that have run: the first of a size, which may be recorded, is not timed.
        self._sizes = set[int]()
        #: Steps lost since a new size was tried, because other sizes have run.
        self._lost = 0.0
        self._began: float | None = None
        self._last: tuple[int, ...] = ()
        self._idle = 0
        self._rests = Rests()
        self._known = 0
        self.trees = isinstance(speculator, Speculator) and speculator.trees
        #: How often the drafts of branches are accepted, if the draft that they replace is wrong.
        self._branch_rates = _Rates(self.most, _FORGOTTEN / 5)
        self._branches: list[Sequence[Branch]] = []

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """The speculator's needs, plus histories."""
        return evolve(self.speculator.needs, histories=True)

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return self.speculator.caches

    @property
    def backends(self) -> Mapping[AttentionSpec, AttentionBackend]:
        return self.speculator.backends

    def admit(self, row: int, prompt: int, salt: str | None) -> None:
        self._rows[row] = _Row()
        self._last = ()  # the time until this row's first step is not that of a step
        self.speculator.admit(row, prompt, salt)

    def release(self, row: int) -> None:
        self._rows.pop(row, None)
        self.speculator.release(row)

    def rest(self, rows: int) -> bool:
        """Whether to look for no drafts in this step of `rows` rows; then `propose` is left out."""
        if not self._cheap or not self._rests.rest(rows, self._clock()):
            return False
        self._last = ()
        return True

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        if not step.rows:
            return self.speculator.propose(step)
        began = self._measure(step)
        proposed = self._propose(step)
        self._rests.search += _NEW * (self._clock() - began - self._rests.search)
        return proposed

    def _propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        rows = [self._rows.setdefault(row, _Row()) for row in step.rows]
        for row, history in zip(rows, step.histories, strict=True):
            if len(row.proposed):
                self._learn(row, history)
        if self._cheap:
            proposed = self.speculator.propose(step)
            if not any(map(len, proposed)):
                for row in rows:
                    row.proposed, row.branches = _NOTHING, ()
                self._branches = [()] * len(rows)
                return proposed
            if len(self._rates) > 1 and isinstance(self.speculator, Speculator):
                for row, drawn in zip(rows, self.speculator.classes_of_drafts(), strict=True):
                    row.drawn = drawn
            if self.trees and isinstance(self.speculator, Speculator):
                return self._tree(step, rows, proposed, self.speculator.branches())
            limits = self._limits(rows, [len(each) for each in proposed])
        elif self.trees:
            return self._drafted_tree(step, rows)
        else:
            limits = self._limits(rows, step.most)
            proposed = self.speculator.propose(evolve(step, most=limits))
        for row, history, tokens in zip(rows, step.histories, proposed, strict=True):
            row.length, row.proposed = len(history), np.asarray(tokens)
        return [tokens[:limit] for tokens, limit in zip(proposed, limits, strict=True)]

    def branches(self) -> Sequence[Sequence[Branch]]:
        """Return the branches beside the last proposal of each row, with `trees`."""
        return self._branches

    def _tree(
        self,
        step: DraftStep,
        rows: Sequence[_Row],
        proposed: Sequence[np.ndarray],
        branches: Sequence[Sequence[Branch]],
    ) -> list[np.ndarray]:
        """Return the most profitable part of the rows' trees: drafts; `branches` has the rest."""
        sizes = [[(depth, len(others)) for depth, others in beside] for beside in branches]
        counts = self._nodes(step, rows, [len(tokens) for tokens in proposed], sizes)
        return self._cut(step, rows, proposed, branches, counts)

    def _drafted_tree(self, step: DraftStep, rows: Sequence[_Row]) -> list[np.ndarray]:
        """Let a drafter that is not cheap draft what pays, with branches of one token; return it
        like `_tree`.
        """
        sizes = [[(depth, 1) for depth in range(most)] for most in step.most]
        counts = self._nodes(step, rows, step.most, sizes)
        limits = self._or_again([main for main, _ in counts], step.most)
        proposed = self.speculator.propose(evolve(step, most=limits))
        branches: Sequence[Sequence[Branch]] = ()
        if isinstance(self.speculator, Speculator):
            branches = self.speculator.branches()
        counts = [(limit, beside) for limit, (_, beside) in zip(limits, counts, strict=True)]
        return self._cut(step, rows, proposed, branches, counts)

    def _nodes(
        self,
        step: DraftStep,
        rows: Sequence[_Row],
        lengths: Sequence[int],
        branches: Sequence[Sequence[tuple[int, int]]],
    ) -> list[tuple[int, list[int]]]:
        """Return how many drafts of each row pay, and how many of each of its branches.

        lengths: drafts of each row. branches: depth and length of each. A node's chance to be
        accepted is never above that of the node before it, so that each part of the order of
        chances is a tree.
        """
        chances: list[np.ndarray] = []
        for row, length, beside in zip(rows, lengths, branches, strict=True):
            main = self._chances(row, length)
            chances.append(main)
            for depth, count in beside:
                before = main[depth - 1] if depth else 1.0
                chances.append((before - main[depth]) * self._branch_rates.of(count).cumprod())
        owners = np.repeat(np.arange(len(chances)), [len(each) for each in chances])
        every = np.concatenate(chances)
        room = sum(min(most, self.most) for most in step.most)
        order = np.argsort(-every, kind="stable")[:room]
        best = self._best(len(rows), every[order].cumsum())
        taken = np.bincount(owners[order[:best]], minlength=len(chances)).tolist()
        counts, at = [], 0
        for beside in branches:
            counts.append((taken[at], taken[at + 1 : at + 1 + len(beside)]))
            at += 1 + len(beside)
        return counts

    def _cut(
        self,
        step: DraftStep,
        rows: Sequence[_Row],
        proposed: Sequence[np.ndarray],
        branches: Sequence[Sequence[Branch]],
        counts: Sequence[tuple[int, Sequence[int]]],
    ) -> list[np.ndarray]:
        """Return so many drafts of each row as `_nodes` counts, and keep such `branches`."""
        limited = []
        self._branches = []
        for index, (row, history, tokens) in enumerate(
            zip(rows, step.histories, proposed, strict=True)
        ):
            row.length, row.proposed = len(history), np.asarray(tokens)
            row.branches, (main, beside) = branches[index], counts[index]
            left = min(step.most[index], self.most) - main
            limited.append(tokens[:main])
            kept: list[Branch] = []
            for (depth, others), count in zip(row.branches, beside, strict=False):
                if count and left > 0:
                    kept.append((depth, others[: min(count, left)]))
                    left -= count
            self._branches.append(kept)
        return limited

    def _measure(self, step: DraftStep) -> float:
        """Record the time since the last step started, if it decoded the same rows; return now."""
        now, rows = self._clock(), tuple(step.rows)
        known = sum(map(len, step.histories))
        if self._began is not None and rows == self._last:
            size = len(step.batch.tokens)
            if size in self._sizes:
                self.times.add(size, now - self._began)
            self._sizes.add(size)
            self._rests.add(len(rows), known - self._known, now - self._began)
        self._began, self._last, self._known = now, rows, known
        return now

    def _learn(self, row: _Row, history: np.ndarray) -> None:
        """Count which tokens proposed for a row were generated."""
        came = history[row.length :][: len(row.proposed)]
        if not len(came):
            return
        same = came == row.proposed[: len(came)]
        right = len(came) if same.all() else int(same.argmin())
        tried = min(right + 1, len(came))
        rates = self._rates[row.drawn]
        row.right += right - _NEW * row.right
        row.expected += float(rates.of(tried).sum()) - _NEW * row.expected
        rates.add(right, tried)
        for depth, tokens in row.branches if right < len(came) else ():
            if depth == right:
                actual = came[depth : depth + len(tokens)]
                match = actual == tokens[: len(actual)]
                count = len(actual) if match.all() else int(match.argmin())
                self._branch_rates.add(count, min(count + 1, len(actual)))

    def _limits(self, rows: Sequence[_Row], lengths: Sequence[int]) -> list[int]:
        """Return how many tokens to draft for each row. lengths: maximum of each row.

        The drafts of all rows are taken in descending order of their chance to be accepted, as
        long as one more increases the tokens per second.
        """
        most = max(lengths)
        if not most:
            return [0] * len(rows)
        if len(rows) == 1:
            gains = self._chances(rows[0], most).cumsum()
            return self._or_again([self._best(1, gains)], lengths)
        chances = np.array([self._chances(row, most) for row in rows])
        chances[np.arange(most) >= np.asarray(lengths)[:, None]] = -1.0
        # A row's chances never increase, and equal ones stay in order.
        order = np.argsort(-chances, axis=None, kind="stable")[: sum(lengths)]
        best = self._best(len(rows), chances.ravel()[order].cumsum())
        limits: list[int] = np.bincount(order[:best] // most, minlength=len(rows)).tolist()
        return self._or_again(limits, lengths)

    def _chances(self, row: _Row, count: int) -> np.ndarray:
        """Return the chances of a row's drafts to be accepted: [count], never increasing."""
        share = (row.right + _PRIOR) / (row.expected + _PRIOR)
        return np.minimum(self._rates[row.drawn].of(count) * share, 1.0).cumprod()

    def _best(self, rows: int, gains: np.ndarray) -> int:
        """Return how many drafts give the most tokens per second. gains: accepted tokens with 1, 2
        ... drafts.
        """
        expected = np.full(len(gains) + 1, float(rows))
        expected[1:] += gains
        sizes = np.arange(rows, rows + len(expected))
        rates = expected / np.maximum(self.times.of(sizes), 1e-9)
        best = int(rates.argmax())
        if rows + best in self._sizes:
            return best
        known = np.where([size in self._sizes for size in sizes.tolist()], rates, 0.0)
        self._lost += 1.0 - float(known.max() / rates[best])
        if self._lost < _FIRST:
            return int(known.argmax())
        self._lost = 0.0
        return best

    def _or_again(self, limits: list[int], lengths: Sequence[int]) -> list[int]:
        """Return the limits, or at times 1 if there was none for long."""
        if self._cheap or any(limits):
            self._idle = 0
            return limits
        self._idle += 1
        if self._idle % _PAUSE:
            return limits
        return [min(1, length) for length in lengths]
