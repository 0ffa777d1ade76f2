"""The scheduler's records of a step: while it is planned, and while it is in flight."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, field

from modulm.contracts.executor import Plan, RowFailure, RowStart, StepResult
from modulm.contracts.requests import Start
from modulm.engine.kv_cache.manager import Hit
from modulm.engine.scheduling.request_queue import Entry
from modulm.errors import EngineError, ModulmError, RequestError, RowError

__all__ = ["NextStep", "StepInFlight", "logprobs_by_request", "row_error", "row_start"]


@define(eq=False)
class NextStep:
    """A step being planned.

    starts: tokens computed before it. counts: known tokens to compute, without drafts. one_each:
    every row decodes, that is computes its last known token and samples the next. number: of the
    step. Other fields as in `Plan`.
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    one_each: bool = False
    admit: tuple[RowStart, ...] = ()
    started: list[Start] = field(factory=list)
    drafted: np.ndarray | None = None
    state_slots: tuple[np.ndarray | None, ...] = ()
    parts: dict[str, Any] = field(factory=dict)
    number: int = 0

    def extended(
        self, joined: Sequence[tuple[Entry, Hit, int]], row_start: Callable[[Entry], RowStart]
    ) -> NextStep:
        """Return the step extended by admitted entries: (entry, its prefix, tokens to compute)."""
        now = time.monotonic()
        running = [item for item in joined if item[2]]
        rows = [entry.row for entry, _, _ in running]
        return NextStep(
            np.concatenate([self.rows, rows]).astype(np.int64),
            np.concatenate([self.starts, [hit.tokens for _, hit, _ in running]]).astype(np.int64),
            np.concatenate([self.counts, [count for _, _, count in running]]).astype(np.int64),
            admit=tuple(row_start(entry) for entry, _, _ in joined),
            started=[
                Start(entry.request.id, hit.tokens, now)
                for entry, hit, _ in joined
                if not entry.preemptions
            ],
        )


@define(eq=False)
class StepInFlight:
    """A plan whose result is pending.

    ends: computed tokens of each row after the step. sampled, places: sampling rows and the
    positions of their tokens, assuming one each. epochs: `RowTable.epoch` when it was planned.
    """

    plan: Plan
    rows: np.ndarray
    ends: np.ndarray
    sampled: np.ndarray
    places: np.ndarray
    epochs: np.ndarray
    generation: int = 0
    started: list[Start] = field(factory=list)
    seconds: float = 0.0


def row_start(entry: Entry, parts: Mapping[str, Any]) -> RowStart:
    """Build the `RowStart` of an entry. Raises EngineError if it has no row."""
    request = entry.request
    if entry.row is None:
        raise EngineError(f"request {request.id!r} is admitted without a row")
    return RowStart(
        row=entry.row,
        request=request.id,
        params=request.params,
        prompt=request.prompt,
        output=entry.history[request.prompt_len :],
        seed=request.seed,
        stop_ids=request.stop_ids(),
        bad_words=request.bad_words,
        salt=request.salt,
        text=request.text,
        parts=parts,
    )


def row_error(failure: RowFailure) -> ModulmError:
    """Return the error for a request whose row failed."""
    if failure.field is None:
        return RowError(failure.message)
    return RequestError(failure.message, failure.field or None)


def logprobs_by_request(
    result: StepResult, flight: StepInFlight, names: Mapping[int, str], tokens: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of `StepEvents` for log probabilities.

    names: row -> request id of rows that still run. tokens: request id of each new token.
    """
    starts = dict(zip(flight.rows.tolist(), flight.plan.starts.tolist(), strict=True))
    counts = Counter(tokens)
    return {
        "logprobs": {
            names[row]: entries[: counts[names[row]]]
            for row, entries in result.logprobs.items()
            if row in names
        },
        "prompt_logprobs": {
            names[row]: (starts[row] + 1, entries)
            for row, entries in result.prompt_logprobs.items()
            if row in names
        },
    }
