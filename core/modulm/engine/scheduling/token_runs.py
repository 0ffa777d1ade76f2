"""Token runs: the tokens that a step's rows gave, one or several each, end to end."""

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
    """rows, ends: of the step, with the tokens computed of each. sampled: those that were to give
    tokens. owners, tokens, places: each token, whose it is, and where it stands in its row.
    """

    rows: np.ndarray
    ends: np.ndarray
    sampled: np.ndarray
    owners: np.ndarray
    tokens: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, step: StepInFlight, result: StepResult) -> TokenRuns:
        """What `result` gives the rows of `step`. Raises EngineError if that cannot be."""
        sampled, places, accepted = step.sampled, step.places, result.accepted
        if accepted is None:
            return cls(step.rows, step.ends, sampled, sampled, result.tokens, places)
        drafted = step.plan.drafted
        most = 1 if drafted is None else 1 + drafted[step.plan.samples]
        if len(accepted) != len(sampled) or (accepted > most).any():
            raise EngineError(f"step {step.plan.step} gave more tokens than were asked for")
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
        """Leave out other rows; alive: [rows of the table] bool."""
        here, heard = alive[self.rows], alive[self.owners]
        self.rows, self.ends = self.rows[here], self.ends[here]
        self.sampled = self.sampled[alive[self.sampled]]
        self._take(heard)

    def cut(self, ended: Sequence[int]) -> np.ndarray:
        """Drop what follows the first token of each row that ends it; which tokens are left.

        ended: indices of tokens that end their rows, ascending.
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
        """Rows that were to give a token and gave none."""
        rows: list[int] = np.setdiff1d(self.sampled, self.owners).tolist()
        return rows

    def unfinished(self, plan: Plan, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Those of `rows` that are still there, and their `Plan.starts`."""
        again = np.isin(plan.rows, rows) & np.isin(plan.rows, self.sampled)
        return plan.rows[again], plan.starts[again]

    def _take(self, kept: np.ndarray) -> None:
        self.owners, self.tokens = self.owners[kept], self.tokens[kept]
        self.places = self.places[kept]
