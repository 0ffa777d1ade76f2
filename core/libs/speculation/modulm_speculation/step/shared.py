"""Drafters of models on several ranks: each rank runs the same drafter over its part of the model.

What to draft depends on what only the first rank knows: accepted tokens, measured times, limits of
requests. It sends that as one tensor, whose shape all ranks know, before it drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from attrs import frozen

from modulm.contracts.drafter import Drafter, DraftStep, Needs

if TYPE_CHECKING:
    from modulm.contracts.attention import AttentionBackend, AttentionSpec
    from modulm.contracts.model import CacheSpec
    from modulm.parallel import ProcessGroup

__all__ = ["SharedDrafter", "SharedStep"]

#: Columns of a row before its new tokens.
_MOST, _LAST, _FOLLOWING, _LENGTH = range(4)
_COLUMNS = 4


@frozen(eq=False)
class SharedStep:
    """What the first rank knows of a step, for each row of its plan.

    most: [rows] maximum drafts, -1 for rows for which nothing is proposed. lasts, following: as in
    `DraftStep`. lengths: [rows] tokens of each row's history, if the drafter needs histories.
    tokens: [rows, n], its last n tokens.
    """

    most: np.ndarray
    lasts: np.ndarray
    following: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray

    @property
    def places(self) -> list[int]:
        """Indices of the rows that drafts are proposed for."""
        found: list[int] = np.flatnonzero(self.most >= 0).tolist()
        return found


class SharedDrafter(Drafter):
    """A drafter that runs on all ranks of `group` at once. device: of the tensors that are sent."""

    name: ClassVar[str] = "shared"
    api: ClassVar[int | tuple[int, int]] = 1

    def __init__(self, drafter: Drafter, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(drafter.config)
        self.drafter, self.group, self._device = drafter, group, device
        self.most = drafter.most
        #: Tokens of each history that are sent: as many as a step can add.
        self._tail = self.most + 1 if drafter.needs.histories else 0

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return self.drafter.needs

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        return self.drafter.caches

    @property
    def backends(self) -> Mapping[AttentionSpec, AttentionBackend]:
        return self.drafter.backends

    def admit(self, row: int, prompt: int, salt: str | None) -> None:
        self.drafter.admit(row, prompt, salt)

    def release(self, row: int) -> None:
        self.drafter.release(row)

    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        """Propose on the first rank, once the others know the step."""
        self._send(step)
        return self.draft(step)

    def draft(self, step: DraftStep) -> Sequence[np.ndarray]:
        """Propose on this rank; all ranks must be called with the same step."""
        if not step.rows and not self.needs.every:
            return []
        return self.drafter.propose(step)

    def receive(self, rows: int) -> SharedStep:
        """Return what the first rank sends of a step with so many rows."""
        sent = torch.empty(rows, _COLUMNS + self._tail, dtype=torch.int64, device=self._device)
        table = self.group.broadcast(sent).cpu().numpy()
        return SharedStep(
            most=table[:, _MOST],
            lasts=table[:, _LAST],
            following=table[:, _FOLLOWING],
            lengths=table[:, _LENGTH],
            tokens=table[:, _COLUMNS:],
        )

    def _send(self, step: DraftStep) -> None:
        order = step.ran.rows.tolist()
        places = {row: index for index, row in enumerate(order)}
        table = np.zeros((len(order), _COLUMNS + self._tail), dtype=np.int64)
        table[:, _MOST] = -1
        table[:, _LAST], table[:, _FOLLOWING] = step.lasts, step.following
        for row, most in zip(step.rows, step.most, strict=True):
            table[places[row], _MOST] = most
        if self._tail:
            for row, history in zip(step.rows, step.histories, strict=True):
                tail = history[-self._tail :]
                table[places[row], _LENGTH] = len(history)
                table[places[row], table.shape[1] - len(tail) :] = tail
        self.group.broadcast(torch.from_numpy(table).to(self._device))
