"""How many tokens are drafted, where a clock of the test's says what a step takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from modulm.contracts.drafter import DraftStep
from modulm_speculation import Options, Speculator
from modulm_speculation.adaptive import Adaptive, StepTimes

_NONE = np.zeros(0, dtype=np.int64)


class Counting(Speculator):
    """Proposes the next numbers, of which the first `right` are so."""

    name = "counting"
    right = 4

    def __init__(self) -> None:
        super().__init__(Options(num_speculative_tokens=4))
        self.limits: list[int] = []

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        self.limits.append(max(step.most))
        return [
            np.array([h[-1] + 1 + i if i < self.right else -5 for i in range(most)], dtype=np.int64)
            for h, most in zip(step.histories, step.most, strict=True)
        ]


class Cheap(Counting):
    cheap = True


def run(drafter: Counting, steps: int, rows: int, cost: Callable[[int], float]) -> list[int]:
    """Drafts of the first row per step; see `run_all`."""
    return [counts[0] for counts in run_all(drafter, steps, rows, cost)]


def run_all(
    drafter: Counting, steps: int, rows: int, cost: Callable[[int], float]
) -> list[list[int]]:
    """Drafts of all rows per step of an engine in which a step of n tokens takes cost(n)."""
    now = [0.0]
    adaptive = Adaptive(drafter, lambda: now[0])
    for row in range(rows):
        adaptive.admit(row, 1, None)
    histories = [[row * 10_000] for row in range(rows)]
    drafts: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * rows
    counts = []
    for _ in range(steps):
        tokens = rows + sum(map(len, drafts))
        now[0] += cost(tokens)
        for history, draft in zip(histories, drafts, strict=True):
            for token in [*draft.tolist(), -9]:
                history.append(history[-1] + 1)
                if token != history[-1]:
                    break
        drafts = list(
            adaptive.propose(
                DraftStep(
                    rows=range(rows),
                    histories=[np.array(history) for history in histories],
                    most=[4] * rows,
                    batch=SimpleNamespace(tokens=np.zeros(tokens)),
                    accepted=np.arange(rows),
                )
            )
        )
        counts.append([len(each) for each in drafts])
    return counts


@pytest.mark.parametrize("kind", [Counting, Cheap])
def test_right_drafts_that_cost_little_are_all_verified(kind) -> None:
    assert run(kind(), 60, 1, lambda tokens: 1 + 0.05 * tokens)[-20:] == [4] * 20


@pytest.mark.parametrize("kind", [Counting, Cheap])
def test_wrong_drafts_are_not_verified(kind) -> None:
    drafter = kind()
    drafter.right = 0
    counts = run(drafter, 300, 1, lambda tokens: 1 + 0.05 * tokens)
    assert sum(counts[-200:]) <= 5


def test_only_what_is_right_is_drafted() -> None:
    drafter = Cheap()
    drafter.right = 2
    counts = run(drafter, 200, 1, lambda tokens: 1 + 0.2 * tokens)
    assert set(counts[-50:]) <= {1, 2}


def test_none_where_a_batch_makes_it_a_loss() -> None:
    drafter = Cheap()
    drafter.right = 1
    assert run(drafter, 100, 1, lambda tokens: 10 + tokens)[-10:] != [0] * 10
    assert run(drafter, 100, 16, lambda tokens: 1.0 * tokens)[-10:] == [0] * 10


def test_what_costs_is_tried_again() -> None:
    drafter = Counting()
    drafter.right = 0
    counts = run(drafter, 400, 1, lambda tokens: 1.0 * tokens)
    assert 1 <= sum(1 for count in counts[-200:] if count) <= 4


class Mixed(Cheap):
    """Right for even rows, whose histories start below 10,000."""

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        proposed = super().propose(step)
        return [
            d if h[0] < 10_000 else d + 5 for h, d in zip(step.histories, proposed, strict=True)
        ]


def test_each_row_has_its_own_number() -> None:
    totals = np.array(run_all(Mixed(), 200, 2, lambda tokens: 1 + 0.1 * tokens)[-50:]).sum(axis=0)
    assert totals[0] == 4 * 50
    assert totals[1] <= 10


def test_a_time_between_two_that_are_known() -> None:
    times = StepTimes()

    def of(tokens: int) -> float:
        return float(times.of(np.array([tokens]))[0])

    assert of(3) == 0
    times.add(1, 1.0)
    assert of(9) == pytest.approx(1.8)  # optimistic: little more for each further token
    times.add(2, 1.25)
    times.add(5, 2.0)
    assert of(3) == 1.5
    times.add(5, 1000.0)
    assert of(5) < 4
    times = StepTimes()
    times.add(4, 2.0)
    assert of(1) == 0.5


def test_a_slow_step_is_forgotten_in_time() -> None:
    times = StepTimes()
    times.add(3, 50.0)
    for _ in range(3000):
        times.add(1, 1.0)
    assert times.of(np.array([3])).tolist() == pytest.approx([1.2])


def test_sizes_that_have_run_are_preferred() -> None:
    now = [0.0]
    adaptive = Adaptive(Cheap(), lambda: now[0])
    adaptive.admit(0, 1, None)
    history, sizes, drafts = [0], [], _NONE
    for index in range(200):
        # The third and fourth draft pay hardly more than the second, now and then.
        size = 1 + len(drafts)
        sizes.append(size)
        now[0] += (1.0, 1.1, 1.2, 1.5, 1.85)[size - 1]
        right = min((2, 2, 3, 4)[index % 4], size - 1)
        history += range(history[-1] + 1, history[-1] + right + 2)
        batch = SimpleNamespace(tokens=np.zeros(size))
        (drafts,) = adaptive.propose(
            DraftStep([0], [np.array(history)], [4], batch, np.zeros(1, dtype=np.int64))
        )
        history[-1] += 7 * (right < size - 1)
    assert len(set(sizes)) <= 4


class Rested(Cheap):
    """Its search takes `search` seconds of the test's clock."""

    right, search = 0, 0.2

    def __init__(self) -> None:
        super().__init__()
        self.now = [0.0]

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        self.now[0] += self.search
        return super().propose(step)


def searches(drafter: Rested, steps: int) -> int:
    """The number of steps with a search, where a plain step takes 1 s and each draft 0.1 s more."""
    adaptive, history, drafts = Adaptive(drafter, lambda: drafter.now[0]), [0], _NONE
    adaptive.admit(0, 1, None)
    for _ in range(steps):
        drafter.now[0] += 1 + len(drafts) / 10
        for token in [*drafts.tolist(), -9]:
            history.append(history[-1] + 1)
            if token != history[-1]:
                break
        if adaptive.rest(1):
            drafts = _NONE
            continue
        batch = SimpleNamespace(tokens=np.zeros(1 + len(drafts)))
        (drafts,) = adaptive.propose(
            DraftStep(
                rows=[0], histories=[np.array(history)], most=[4], batch=batch,
                accepted=np.zeros(1, dtype=np.int64),
            )
        )  # fmt: skip
    return len(drafter.limits)


@pytest.mark.parametrize(
    ("right", "search", "share"),
    [(0, 0.2, (0.0, 0.15)), (4, 0.2, (0.9, 1.0)), (0, 0.001, (1.0, 1.0))],
    ids=["in vain", "worth it", "not noticeable"],
)
def test_a_search_that_gains_nothing_rests(
    right: int, search: float, share: tuple[float, float]
) -> None:
    drafter = Rested()
    drafter.right, drafter.search = right, search
    assert share[0] <= searches(drafter, 1000) / 1000 <= share[1]
