"""States of recurrent layers: what a layer keeps per sequence, and where a step finds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from modulm.contracts.recording import Recordable

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch

__all__ = ["API", "SEGMENT", "StatePlan", "StateSpec"]

API = 1

#: Tokens that are computed together. States of prefixes are only kept at multiples of it.
SEGMENT = 64


@frozen
class StateSpec:
    """Per-sequence state of a recurrent layer: (name, shape, dtype) of each tensor of a slot."""

    tensors: tuple[tuple[str, tuple[int, ...], str], ...]


@frozen(eq=False)
class StatePlan(Recordable):
    """The plan of a state group: which slot each row of the step reads and writes.

    slots: [rows] int64, where the state after the row's last token goes. sources: [rows] int64,
    where the state before its first token lies; None: in `slots`. fresh: [rows] bool, the row
    starts from zeros and its source holds garbage. query_starts: [rows + 1] int32.
    On the host: counts, tokens of each row; starts, first position of each row (empty if all are 0
    or no row has several tokens); kept: intermediate states to store as well, each as (index of the
    row in the step, its tokens up to there, slot), bit-identical to steps that end there.
    """

    slots: torch.Tensor
    fresh: torch.Tensor
    query_starts: torch.Tensor
    counts: tuple[int, ...]
    starts: tuple[int, ...] = ()
    sources: torch.Tensor | None = None
    kept: tuple[tuple[int, int, int], ...] = ()

    def key(self) -> Hashable:
        return self.counts, self.starts, self.kept

    def tensors(self) -> tuple[torch.Tensor, ...]:
        own = (self.slots, self.fresh, self.query_starts)
        return own if self.sources is None else (*own, self.sources)

    def over(
        self, tensors: Sequence[torch.Tensor], tables: Sequence[torch.Tensor] = ()
    ) -> StatePlan:
        slots, fresh, query_starts, *sources = tensors
        moved = evolve(self, slots=slots, fresh=fresh, query_starts=query_starts)
        return evolve(moved, sources=sources[0]) if sources else moved
