"""The contract kit for speculators that need no model of their own.

    from modulm.testing.speculators import check_speculator

    def test_contract():
        check_speculator(MySpeculator)

Rows with repeating and random tokens are drafted for, in batches and one by one, with and without
room for drafts. Drafters that read hidden states or have caches are checked with their model by
`modulm.testing.drafters` and tests of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from modulm.contracts.drafter import Drafter, DraftStep, Needs
from modulm.errors import ModulmError
from modulm.testing.kit import KitNotRun

__all__ = ["check_speculator"]

_VOCABULARY = 64


def check_speculator(driver: type[Drafter], *, config: Any = None) -> None:
    """Run the kit. config: the options; the defaults of `Config` without it.

    Raises AssertionError with what was expected, KitNotRun for a drafter that needs a model.
    """
    assert isinstance(driver.needs, Needs), f"needs is {driver.needs!r}"
    if driver.needs.hidden or driver.needs.layers:
        raise KitNotRun("it reads the model's hidden states")
    options = _options(driver) if config is None else config
    try:
        drafter = driver(options)
    except (TypeError, ModulmError) as error:
        raise KitNotRun(f"it needs a model: {error}") from error
    if drafter.caches:
        raise KitNotRun("it runs a model of its own")
    most = drafter.most
    assert isinstance(most, int) and most >= 1, f"most is {most!r}, not a number of drafts"  # noqa: PT018
    histories = _histories()
    room = [most, max(1, most // 2), 1, 0, most, most]
    together = _propose(driver(options), range(len(histories)), histories, room)
    assert any(len(drafts) for drafts in together), "no drafts for text that repeats itself"
    for row, history in enumerate(histories):
        (alone,) = _propose(driver(options), [row], [history], [room[row]])
        same = np.array_equal(alone, together[row])
        assert same, f"row {row} gets other drafts in a batch than alone"
    _check_release(driver, options, histories)


def _options(driver: type[Drafter]) -> Any:
    try:
        return driver.Config()
    except (TypeError, ModulmError) as error:
        raise KitNotRun(f"its options have no defaults ({error}): pass config=") from error


def _histories() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    repeating = np.tile(np.arange(10, 16), 12)
    words = np.concatenate([draw.integers(8, _VOCABULARY, 30), np.full(30, 9)])
    return [
        repeating,
        words,
        np.tile(np.arange(20, 23), 20),
        repeating[:40],
        np.array([5]),
        draw.integers(8, _VOCABULARY, 50),
    ]


def _propose(
    drafter: Drafter, rows: Sequence[int], histories: Sequence[np.ndarray], room: Sequence[int]
) -> list[np.ndarray]:
    """Propose once, and check the form of the drafts."""
    for row, history in zip(rows, histories, strict=True):
        drafter.admit(row, min(4, len(history)), None)
    copies = [history.astype(np.int64) for history in histories]
    lasts: Any = np.zeros(len(copies), dtype=np.int64)
    step = DraftStep(list(rows), copies, list(room), batch=None, accepted=lasts)  # type: ignore[arg-type]
    drafts = list(drafter.propose(step))
    assert len(drafts) == len(copies), f"{len(drafts)} arrays of drafts for {len(copies)} rows"
    for one, most, copy, history in zip(drafts, room, copies, histories, strict=True):
        assert isinstance(one, np.ndarray), f"drafts are {type(one).__name__}, not an array"
        assert one.ndim == 1, f"drafts have the shape {one.shape}"
        assert one.dtype == np.int64, f"drafts are {one.dtype}, not int64"
        assert len(one) <= most, f"{len(one)} drafts where {most} were allowed"
        known = bool(np.isin(one, copy).all())
        fits = bool(((one >= 0) & (one < _VOCABULARY)).all())
        assert known or fits, f"drafts {one.tolist()} are no tokens"
        assert np.array_equal(copy, history), "propose() changes the rows' tokens"
    return drafts


def _check_release(driver: type[Drafter], options: Any, histories: Sequence[np.ndarray]) -> None:
    """Check that a row's next request gets nothing of the one before it."""
    drafter, other = driver(options), np.tile(np.arange(30, 34), 12)
    _propose(drafter, [2], [other], [drafter.most])
    drafter.release(2)
    drafter.release(5)  # unknown
    (used,) = _propose(drafter, [2], [histories[5]], [drafter.most])
    assert not np.isin(used, np.arange(30, 34)[~np.isin(np.arange(30, 34), histories[5])]).any(), (
        "release() leaves tokens for the row's next request"
    )
    (new,) = _propose(driver(options), [2], [histories[0]], [drafter.most])
    drafter.release(2)
    (again,) = _propose(drafter, [2], [histories[0]], [drafter.most])
    assert len(again) >= len(new), "a row that was used before gets fewer drafts"
