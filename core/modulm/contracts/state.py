"""States of recurrent layers: their tensors, and the slots that a step reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from modulm.contracts.recording import Recordable

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch

__all__ = ["API", "SEGMENT", "StatePlan", "StateSpec"]

API = 1

#: Tokens per chunk of the recurrence. Prefix states are only cached at multiples of it.
SEGMENT = 64


@frozen
class StateSpec:
    """State of a recurrent layer: (name, shape, dtype) of each tensor of a sequence's slot."""

    tensors: tuple[tuple[str, tuple[int, ...], str], ...]


@frozen(eq=False)
class StatePlan(Recordable):
    """The slots that each row of a step reads and writes, for one group of states.

    slots: [rows] int64, slot for the state after the row's last token. sources: [rows] int64, slot
    of the state before its first token; None: `slots`. fresh: [rows] bool, the row starts from
    zeros instead of its source. query_starts: [rows + 1] int32.
    On the host: counts: tokens per row. starts: first position of each row; empty if all are 0 or
    no row has several tokens. saves: intermediate states to store, each as (row index in the step,
    tokens of the row before it, slot), bit-identical to those of steps that end there.
    """

    slots: torch.Tensor
    fresh: torch.Tensor
    query_starts: torch.Tensor
    counts: tuple[int, ...]
    starts: tuple[int, ...] = ()
    sources: torch.Tensor | None = None
    saves: tuple[tuple[int, int, int], ...] = ()
    #: The former name of `saves`.
    kept = property(lambda self: self.saves)

    def key(self) -> Hashable:
        return self.counts, self.starts, self.saves

    def tensors(self) -> tuple[torch.Tensor, ...]:
        own = (self.slots, self.fresh, self.query_starts)
        return own if self.sources is None else (*own, self.sources)

    def over(
        self, tensors: Sequence[torch.Tensor], tables: Sequence[torch.Tensor] = ()
    ) -> StatePlan:
        slots, fresh, query_starts, *sources = tensors
        moved = evolve(self, slots=slots, fresh=fresh, query_starts=query_starts)
        return evolve(moved, sources=sources[0]) if sources else moved
