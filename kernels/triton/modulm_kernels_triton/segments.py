"""Where the rows of a step are cut for recurrent layers, as `modulm.ops.chunked_scan` cuts them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from modulm.contracts.model import StatePlan
from modulm.ops.chunked_scan import SEGMENT

__all__ = ["SEGMENT", "Segments", "dense", "fresh", "segments", "sources"]


@frozen(eq=False)
class Segments:
    """bounds: [rows + 1] int32, each row's first of pieces: [n, 3] int32: the first token, how
    many, and the slot that takes the state after them (-1: none).
    """

    bounds: Tensor
    pieces: Tensor


_known: WeakKeyDictionary[StatePlan, Segments] = WeakKeyDictionary()


def segments(plan: StatePlan, device: torch.device) -> Segments | None:
    """Of the step; None where each row has a token and no state is wanted on the way.

    Made once per step, for all layers.
    """
    if max(plan.counts) == 1 and not plan.kept:
        return None
    found = _known.get(plan)
    if found is None:
        found = _known[plan] = _cut(plan, device)
    return found


def _cut(plan: StatePlan, device: torch.device) -> Segments:
    starts = plan.starts or (0,) * len(plan.counts)
    wanted: dict[int, list[tuple[int, int]]] = {}
    for row, at, slot in plan.kept:
        wanted.setdefault(row, []).append((at, slot))
    bounds, pieces, first = [0], [], 0
    for row, (start, count) in enumerate(zip(starts, plan.counts, strict=True)):
        stops = [(at, -1) for at in range(SEGMENT - start % SEGMENT, count, SEGMENT)]
        kept = wanted.get(row, [])
        places = {at for at, _ in kept}
        stops = sorted([stop for stop in stops if stop[0] not in places] + kept)
        if count not in places:
            stops.append((count, -1))
        at = 0
        for stop, slot in stops:
            pieces.append((first + at, stop - at, slot))
            at = stop
        bounds.append(len(pieces))
        first += count
    return Segments(_sent(bounds, device), _sent(pieces, device))


def _sent(numbers: list[int] | list[tuple[int, int, int]], device: torch.device) -> Tensor:
    """int32, on its way to the device; the host does not wait for what runs there."""
    held = torch.from_numpy(np.array(numbers, dtype=np.int32))
    return held if device.type == "cpu" else held.pin_memory().to(device, non_blocking=True)


def sources(plan: StatePlan) -> Tensor:
    """[rows] int64, the slots of the states before the step."""
    return plan.slots if plan.sources is None else plan.sources


def fresh(plan: StatePlan) -> Tensor:
    """[rows] uint8, whether a row starts from zeros."""
    return plan.fresh.view(torch.uint8)


def dense(x: Tensor) -> Tensor:
    """x: [T, ...], copied unless each token's numbers lie together."""
    inner = x[:1].contiguous().stride()[1:]
    return x if x.stride()[1:] == inner else x.contiguous()
