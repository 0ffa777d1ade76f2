"""Drafter: proposes tokens that the model then verifies (group `modulm.speculators`).

It runs beside the model, in the worker, after each step. What it proposes goes with the result to
the scheduler and comes back as drafted tokens of the next plan. Verification keeps the model's
distribution exactly, whatever is proposed.
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
    """What a drafter wants to see. histories: the rows' tokens. hidden: the model's hidden states
    after its final norm; layers: those that these layers give, by index. every: also the steps in
    which nothing can be proposed, since no row gave a token, or none may have drafts.
    """

    histories: bool = True
    hidden: bool = False
    layers: tuple[int, ...] = ()
    every: bool = False


@frozen(eq=False)
class Runs:
    """Some tokens of some rows, laid end to end: what a step ran, or what a drafter's model is to.

    rows: [n] int, the rows; starts: [n] int, the position of each row's first token; counts: [n]
    int32, how many tokens it has; tokens: [sum(counts)] int64.
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    tokens: np.ndarray

    @property
    def lasts(self) -> np.ndarray:
        """[n] the place of each row's last token."""
        ends: np.ndarray = np.cumsum(self.counts)
        return ends - 1


_NOTHING = Runs(*[np.zeros(0, dtype=np.int64)] * 4)


def _no_batch(runs: Runs) -> Batch:
    raise UnsupportedError("a drafter without caches has no batches of its own")


@frozen(eq=False)
class DraftStep:
    """A step that has run, as a drafter sees it.

    rows: the rows to propose for, each with at least one new token. histories: per row all of its
    tokens, int64; empty if not needed. most: per row, how many tokens may be proposed. batch: what
    the model ran on, with the tensors of the drafter's own caches in `batch.caches` after the
    model's, if it brings no backends for them. kept: [rows] int64, the place in the batch of each
    row's last position that counts (what follows it was rejected). hidden: [tokens, hidden] of the
    whole batch, or None; layers: the same of the layers asked for.

    For drafters with a model of their own. ran: what the step ran, of all its rows, also of those
    that give no token yet or may have no drafts; lasts, following: [rows of ran] int64, the place
    of the last token of each that counts, and the token that comes after it (-1: unknown). own:
    makes a batch whose caches are the drafter's alone, in the blocks of the rows of the step,
    valid until it makes the next; `sample` are the rows' last places, or all if no row has more
    than the drafter's `most` and one. There are blocks for `most` tokens after those that ran.
    tables: the block table of each of the drafter's caches, [rows of ran, blocks] int32, and
    sizes: the tokens of a block.
    """

    rows: Sequence[int]
    histories: Sequence[np.ndarray]
    most: Sequence[int]
    batch: Batch
    kept: np.ndarray
    hidden: torch.Tensor | None = None
    layers: tuple[torch.Tensor, ...] = ()
    ran: Runs = _NOTHING
    lasts: np.ndarray = _NOTHING.rows
    following: np.ndarray = _NOTHING.rows
    own: Callable[[Runs], Batch] = _no_batch
    tables: Sequence[np.ndarray] = ()
    sizes: Sequence[int] = ()


class Drafter(ABC):
    """Proposes the next tokens of rows. `Config`: its options (attrs, frozen).

    A driver is in use where the configuration has a table for it:
    `--plugin-config '{"speculators": {"NAME": {...}}}'`. `most`: tokens that it may propose for a
    row in a step, set when it is made; blocks and steps are sized for them.
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
        """What it keeps for the tokens of a row, in the blocks that the model's layers use too."""
        return ()

    @property
    def backends(self) -> Mapping[AttentionSpec, AttentionBackend]:
        """The attention backends of its caches, by their specs, where its layers bring their own.

        A cache without one has to be like those of some layer of the model, and uses its backend.
        """
        return {}

    @abstractmethod
    def propose(self, step: DraftStep) -> Sequence[np.ndarray]:
        """One [n] int64 array per row of the step, n from 0 to its `most`."""

    def admit(self, row: int, prompt: int, salt: str | None) -> None:
        """A row starts, or starts again after it was preempted. prompt: tokens of its prompt; salt:
        rows of different salt are told nothing of one another.
        """

    def release(self, row: int) -> None:
        """A row is gone."""
