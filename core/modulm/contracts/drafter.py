"""Drafter: proposes tokens that the model then verifies (group `modulm.speculators`).

It runs in the worker after each step. Its drafts return to the scheduler with the step's result
and are verified in the next step. Verification preserves the model's distribution exactly, whatever
is proposed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from attrs import frozen

from modulm.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from modulm.contracts.attention import AttentionBackend, AttentionSpec
    from modulm.contracts.model import Batch, CacheSpec

__all__ = ["API", "DraftStep", "Drafter", "Needs", "Runs"]

API = 1


@frozen
class Needs:
    """The inputs that a drafter needs.

    histories: the rows' tokens. hidden: hidden states after the model's final norm. layers:
    indices of layers whose hidden states are needed. every: call it also for steps in which
    nothing can be proposed, because no row got a token or none may have drafts.
    """

    histories: bool = True
    hidden: bool = False
    layers: tuple[int, ...] = ()
    every: bool = False


@frozen(eq=False)
class Runs:
    """Consecutive tokens of several rows, concatenated, as run by a step or by a drafter's model.

    rows: [n] int. starts: [n] int, position of each row's first token. counts: [n] int32, tokens
    per row. tokens: [sum(counts)] int64.
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray

    @property
    def lasts(self) -> np.ndarray:
        """Index of each row's last token: [n]."""
        ends: np.ndarray = np.cumsum(self.counts)
        return ends - 1


_NOTHING = Runs(*[np.zeros(0, dtype=np.int64)] * 4)


def _no_batch(runs: Runs) -> Batch:
    raise UnsupportedError("a drafter without caches cannot build batches")


@frozen(eq=False)
class DraftStep:
    """A step that has run, as a drafter sees it.

    rows: the rows to propose for, each with at least one new token. histories: all tokens of each
    row, int64; empty if not needed. most: maximum drafts per row. batch: the batch that the model
    ran on; if the drafter's caches use the model's backends, their tensors follow the model's in
    `batch.caches`. accepted: [rows] int64, index in the batch of each row's last accepted position.
    hidden: [tokens, hidden] of the whole batch, or None. layers: the same for `Needs.layers`.

    The other fields are for drafters that run a model of their own. ran: the tokens that the step
    ran, including rows without new tokens or drafts. lasts: [rows of ran] int64, index of each
    row's last accepted token. following: [rows of ran] int64, the token after it (-1: unknown).
    build_batch: builds a batch with only the drafter's caches, valid until the next call; its
    `sample` is each row's last index, or all indices if no row has more than `most + 1` tokens.
    Blocks exist for `most` tokens after those that ran. tables: block table of each of the
    drafter's caches, [rows of ran, blocks] int32. sizes: their block sizes in tokens.
    """

    rows: Sequence[int]
    histories: Sequence[np.ndarray]
    most: Sequence[int]
    batch: Batch
    accepted: np.ndarray
    hidden: torch.Tensor | None = None
    layers: tuple[torch.Tensor, ...] = ()
    ran: Runs = _NOTHING
    lasts: np.ndarray = _NOTHING.rows
    following: np.ndarray = _NOTHING.rows
    build_batch: Callable[[Runs], Batch] = _no_batch
    tables: Sequence[np.ndarray] = ()
    sizes: Sequence[int] = ()
    #: The former names of `accepted` and `build_batch`.
    kept = property(lambda self: self.accepted)
    own = property(lambda self: self.build_batch)


class Drafter(ABC):
    """Proposes the next tokens of rows. `Config`: its options (attrs, frozen).

    A drafter is enabled by a table in the configuration:
    `--plugin-config '{"speculators": {"NAME": {...}}}'`. `most`: maximum drafts per row and step,
    set on construction; blocks and steps are sized for it.
    """

    name: ClassVar[str]
    api: ClassVar[int | tuple[int, int]]
    Config: ClassVar[type]
    needs: ClassVar[Needs] = Needs()
    most: int

    def __init__(self, config: object) -> None:
        self.config = config

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """The drafter's own KV caches, stored in the same blocks as those of the model's layers."""
        return ()

    @property
    def backends(self) -> Mapping[AttentionSpec, AttentionBackend]:
        """Attention backends of the drafter's own caches, by spec.

        A cache without one must have the spec of some layer of the model, and uses its backend.
        """
        return {}

    @abstractmethod
    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        """Return the drafts: one [n] int64 array per row of the step, 0 <= n <= its `most`."""

    def admit(self, row: int, prompt: int, salt: str | None) -> None:
        """Start a row, or restart it after preemption.

        prompt: length of its prompt in tokens. salt: rows with different salts must not influence
        each other.
        """

    def release(self, row: int) -> None:
        """Forget a row."""
