"""Chunked scan of recurrent states over the rows of a step, split at fixed positions.

Rows are split at multiples of SEGMENT, however their tokens are distributed over steps. A step that
ends at such a position leaves bit for bit the state that a longer step has there. Rows are also
split where an intermediate state must be saved, as if a step ended there. Segments of a single
token, such as those of decode steps, use `step`; longer ones are padded to SEGMENT with tokens that
do not change the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen
from torch import Tensor

from modulm.contracts.state import SEGMENT

if TYPE_CHECKING:
    from modulm.contracts.model import StatePlan

__all__ = ["ScanStep", "chunked_scan", "initial_states"]

#: (states [n, ...], updated in place; token indices [n] or [n, SEGMENT]) -> outputs.
ScanStep = Callable[[Tensor, Tensor], Tensor]


def chunked_scan(
    states: Tensor, plan: StatePlan, step: ScanStep, segment: ScanStep, out: Tensor
) -> Tensor:
    """Advance all rows segment by segment, updating their states.

    states: [slots, ...]. out: [T, ...], filled and returned. `step` and `segment` process rows side
    by side, each at most once per wave of segments.
    """
    state = initial_states(states, plan)
    if max(plan.counts) == 1 and not plan.saves:  # uses no host data, so it can be recorded
        out.copy_(step(state, torch.arange(out.shape[0], device=states.device)))
        states[plan.slots] = state
        return out
    padded = out.new_empty(out.shape[0] + 1, *out.shape[1:])
    for wave in _waves(plan, out.shape[0]):
        for rows, places, advance in ((wave.long, wave.segments, segment), (*wave.short, step)):
            if len(rows):
                index = torch.tensor(rows, device=states.device)
                moved, at = state[index], places.to(states.device)
                padded[at] = advance(moved, at)
                state[index] = moved
        for row, slot in wave.kept:
            states[slot] = state[row]
    states[plan.slots] = state
    out.copy_(padded[:-1])
    return out


def initial_states(states: Tensor, plan: StatePlan) -> Tensor:
    """Copy the rows' states; zeros for fresh rows, whose slots hold garbage."""
    held = states[plan.slots if plan.sources is None else plan.sources]
    return held.masked_fill_(plan.fresh.view(-1, *[1] * (held.dim() - 1)), 0.0)


@frozen(eq=False)
class _Wave:
    """The next segment of every row that has one left.

    long: rows with several tokens, and segments: [n, SEGMENT] their token indices. short: rows with
    one token, and its index. kept: (row, slot) of states to save after the wave.
    """

    long: list[int]
    segments: Tensor
    short: tuple[list[int], Tensor]
    kept: list[tuple[int, int]] = field(factory=list)


def _waves(plan: StatePlan, tokens: int) -> list[_Wave]:
    """Return the step's waves in order. Padding has the token index `tokens`: the zero token."""
    counts, starts = plan.counts, plan.starts or (0,) * len(plan.counts)
    if max(counts) == 1:
        singles = [(row, row, 1) for row in range(len(counts))]
        return [_wave(singles, tokens, [(row, slot) for row, _, slot in plan.saves])]
    pieces: list[list[tuple[int, int, int]]] = []
    ends: dict[tuple[int, int], int] = {}
    stops_of_rows: dict[int, list[int]] = {}
    for row, at, _ in plan.saves:
        stops_of_rows.setdefault(row, []).append(at)
    first = 0
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        stops = {
            *range(SEGMENT - start % SEGMENT, count, SEGMENT),
            *stops_of_rows.get(row, ()),
            count,
        }
        at = 0
        for index, stop in enumerate(sorted(stops)):
            if index == len(pieces):
                pieces.append([])
            pieces[index].append((row, first + at, stop - at))
            at = stop
            ends[row, at] = index
        first += count
    kept: list[list[tuple[int, int]]] = [[] for _ in pieces]
    for row, at, slot in plan.saves:
        kept[ends[row, at]].append((row, slot))
    return [_wave(piece, tokens, held) for piece, held in zip(pieces, kept, strict=True)]


def _wave(pieces: list[tuple[int, int, int]], tokens: int, kept: list[tuple[int, int]]) -> _Wave:
    """Build a wave from pieces: (row, first token, number of tokens)."""
    long = [piece for piece in pieces if piece[2] > 1]
    short = [piece for piece in pieces if piece[2] == 1]
    firsts = torch.tensor([first for _, first, _ in long], dtype=torch.int64).unsqueeze(1)
    sizes = torch.tensor([size for _, _, size in long], dtype=torch.int64).unsqueeze(1)
    ramp = torch.arange(SEGMENT).unsqueeze(0)
    places = torch.where(ramp < sizes, firsts + ramp, tokens)
    singles = torch.tensor([first for _, first, _ in short], dtype=torch.int64)
    rows = [row for row, _, _ in short]
    return _Wave([row for row, _, _ in long], places, (rows, singles), kept)
