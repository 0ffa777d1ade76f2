"""Split layers into pipeline stages of about equal weight bytes."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from attrs import evolve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from modulm.nn.builder import Builder
    from modulm.nn.weight_slots import Unit

__all__ = ["even_stages", "weight_of"]


def weight_of(make: Callable[[Builder], object], b: Builder) -> int:
    """Return the bytes on this rank of the weights that `make` creates; the result is discarded."""
    units: list[Unit] = []
    shared = evolve(b.shared, adapters=None, caches=[], units=units, elsewhere=[])
    make(evolve(b, shared=shared))
    return sum(prod(slot.shape) * slot.dtype.itemsize for unit in units for slot in unit.slots)


def even_stages(
    layers: Sequence[int], stages: int, *, first: int = 0, last: int = 0
) -> tuple[int, ...]:
    """Number of layers per stage (at least one), minimizing the sum of squared stage sizes.

    Of equal splits the one with larger first stages wins. layers: bytes of each layer; first, last:
    additional bytes of the first and the last stage.
    """
    count, before = len(layers), [0]
    for size in layers:
        before.append(before[-1] + size)
    before = [first + size for size in before]
    before[0] = 0
    before[-1] += last
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for stage in range(1, stages + 1):
        ends = range(stage, count - stages + stage + 1) if stage < stages else (count,)
        choices: dict[int, tuple[int, int]] = {}
        for end in ends:
            choices[end] = min(
                (cost + (before[end] - before[at]) ** 2, -at)
                for at, (cost, _) in best[-1].items()
                if at < end
            )
        best.append(choices)
    cuts = [count]
    for choices in reversed(best[1:]):
        cuts.append(-choices[cuts[-1]][1])
    return tuple(end - at for at, end in zip(cuts[:0:-1], cuts[-2::-1], strict=True))
