"""Token runs: the new tokens of a step's rows, one or several each, concatenated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define

from modulm.contracts.executor import Plan, StepResult
from modulm.engine.scheduling.step import StepInFlight
from modulm.errors import EngineError

__all__ = ["TokenRuns"]


@define(eq=False)
class TokenRuns:
    """The new tokens of a step.

    rows, ends: the step's rows and the number of computed tokens of each. sampled: the sampling
    rows. owners, tokens, places: row, id and position in the row of each new token.
    """

    rows: np.ndarray
    ends: np.ndarray
    sampled: np.ndarray
    owners: np.ndarray
    tokens: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, step: StepInFlight, result: StepResult) -> TokenRuns:
        """Read the tokens of a result. Raises EngineError if it does not fit the step."""
        sampled, places, accepted = step.sampled, step.places, result.accepted
        if accepted is None:
            return cls(step.rows, step.ends, sampled, sampled, result.tokens, places)
        drafted = step.plan.drafted
        most = 1 if drafted is None else 1 + drafted[step.plan.samples]
        if len(accepted) != len(sampled) or (accepted > most).any():
            raise EngineError(f"step {step.plan.step} returned more tokens than requested")
        ends = step.ends
        if drafted is not None:
            ends = ends.copy()
            ends[step.plan.samples] += np.maximum(accepted - 1, 0)
        owners = np.repeat(sampled, accepted)
        ramp = np.arange(len(owners)) - np.repeat(np.cumsum(accepted) - accepted, accepted)
        return cls(
            step.rows, ends, sampled, owners, result.tokens, np.repeat(places, accepted) + ramp
        )

    def keep(self, alive: np.ndarray) -> None:
        """Drop the rows that are not alive. alive: [rows of the table] bool."""
        row_mask = alive[self.rows]
        self.rows, self.ends = self.rows[row_mask], self.ends[row_mask]
        self.sampled = self.sampled[alive[self.sampled]]
        self._take(alive[self.owners])

    def cut(self, ended: Sequence[int]) -> np.ndarray:
        """Drop tokens after the first one that ends each row; return the mask of those left.

        ended: ascending indices of tokens that end their rows.
        """
        left = np.ones(len(self.owners), dtype=np.bool_)
        for index in ended:
            if not left[index]:
                continue
            row = self.owners[index]
            left[index + 1 :] &= self.owners[index + 1 :] != row
            self.ends[self.rows == row] = self.places[index]
        self._take(left)
        return left

    def silent(self) -> list[int]:
        """Return the sampling rows that produced no token."""
        rows: list[int] = np.setdiff1d(self.sampled, self.owners).tolist()
        return rows

    def unfinished(self, plan: Plan, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return those of `rows` that still run, and their `Plan.starts`."""
        mask = np.isin(plan.rows, rows) & np.isin(plan.rows, self.sampled)
        return plan.rows[mask], plan.starts[mask]

    def _take(self, mask: np.ndarray) -> None:
        self.owners, self.tokens = self.owners[mask], self.tokens[mask]
        self.places = self.places[mask]
