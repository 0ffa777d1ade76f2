"""Segments of a step's rows for recurrent layers, as in `modulm_layers.chunked_scan`."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.model import StatePlan
from modulm.contracts.state import SEGMENT

__all__ = ["SEGMENT", "Segments", "dense", "fresh", "segments", "sources"]


@frozen(eq=False)
class Segments:
    """bounds: [rows + 1] int32, each row's first piece. pieces: [n, 3] int32: first token, count,
    and the slot for the state after them (-1: none).
    """

    bounds: Tensor
    pieces: Tensor


_known: WeakKeyDictionary[StatePlan, Segments] = WeakKeyDictionary()


def segments(plan: StatePlan, device: torch.device) -> Segments | None:
    """Return a step's segments; None with one token per row and no intermediate state to save.

    Built once per step, for all layers.
    """
    if max(plan.counts) == 1 and not plan.kept:
        return None
    cached = _known.get(plan)
    if cached is None:
        cached = _known[plan] = _cut(plan, device)
    return cached


def _cut(plan: StatePlan, device: torch.device) -> Segments:
    starts = plan.starts or (0,) * len(plan.counts)
    wanted: dict[int, list[tuple[int, int]]] = {}
    for row, at, slot in plan.kept:
        wanted.setdefault(row, []).append((at, slot))
    bounds, pieces, first = [0], [], 0
    for row, (start, count) in enumerate(zip(starts, plan.counts, strict=True)):
        stops = [(at, -1) for at in range(SEGMENT - start % SEGMENT, count, SEGMENT)]
        stops_kept = wanted.get(row, [])
        kept_at = {at for at, _ in stops_kept}
        stops = sorted([stop for stop in stops if stop[0] not in kept_at] + stops_kept)
        if count not in kept_at:
            stops.append((count, -1))
        at = 0
        for stop, slot in stops:
            pieces.append((first + at, stop - at, slot))
            at = stop
        bounds.append(len(pieces))
        first += count
    return Segments(_sent(bounds, device), _sent(pieces, device))


def _sent(numbers: list[int] | list[tuple[int, int, int]], device: torch.device) -> Tensor:
    """Copy numbers to the device as int32 without waiting for running work."""
    array = torch.from_numpy(np.array(numbers, dtype=np.int32))
    return array if device.type == "cpu" else array.pin_memory().to(device, non_blocking=True)


def sources(plan: StatePlan) -> Tensor:
    """Return [rows] int64, the slots of the states before the step."""
    return plan.slots if plan.sources is None else plan.sources


def fresh(plan: StatePlan) -> Tensor:
    """Return [rows] uint8, whether a row starts from zeros."""
    return plan.fresh.view(torch.uint8)


def dense(x: Tensor) -> Tensor:
    """Return x [T, ...], copied unless it is dense per token."""
    inner = x[:1].contiguous().stride()[1:]
    return x if x.stride()[1:] == inner else x.contiguous()
