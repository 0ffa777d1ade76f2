"""Which rank holds which experts, some of them more than once, so that all have as much to do.

After DeepSeek's expert-parallel load balancer (arXiv 2412.19437, 3.4.2): experts that many tokens
choose get more copies, and copies are dealt out from the heaviest on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["balancedness", "first_placement", "placement", "rank_loads"]


def first_placement(experts: int, ranks: int, spare: int) -> np.ndarray:
    """Who is in each slot before anything is known: [ranks, experts / ranks + spare] int64, each
    rank's own experts as checkpoints are cut, and then copies of the next rank's.
    """
    own = np.arange(experts).reshape(ranks, -1)
    copies = [np.resize(np.roll(own, -1, 0)[rank], spare) for rank in range(ranks)]
    return np.concatenate([own, np.array(copies, dtype=own.dtype).reshape(ranks, spare)], 1)


def placement(counts: Sequence[int] | np.ndarray, before: np.ndarray) -> np.ndarray:
    """Who should be in each slot: [ranks, slots]. Each expert is somewhere, and no rank has more to
    do than the busiest one before. An expert that stays on a rank stays in its slot.

    counts: [experts], tokens that chose each. before: [ranks, slots], who is there now.
    """
    counts, (ranks, slots) = np.asarray(counts, dtype=np.float64), before.shape
    copies = _copies(counts, ranks * slots, ranks)
    shares = counts / copies
    free = np.full(ranks, slots)
    loads = np.zeros(ranks)
    found: list[list[int]] = [[] for _ in range(ranks)]
    # The heaviest first; of equal ones those with most copies, which fit in fewest places.
    for expert in sorted(range(len(counts)), key=lambda e: (-shares[e], -copies[e], e)):
        for _ in range(copies[expert]):
            open_to = [r for r in range(ranks) if free[r]]
            without = [r for r in open_to if expert not in found[r]]
            rank = min(without or open_to, key=lambda r: (loads[r], r))
            found[rank].append(expert)
            loads[rank] += shares[expert]
            free[rank] -= 1
    made = np.array([_settled(wanted, there) for wanted, there in zip(found, before, strict=True)])
    better = rank_loads(counts, made).max() < rank_loads(counts, before).max()
    return made if better else before


def rank_loads(counts: np.ndarray, placed: np.ndarray) -> np.ndarray:
    """Tokens that each rank has to do with, copies of an expert taking equal shares: [ranks]."""
    copies = np.bincount(placed.ravel(), minlength=len(counts))
    loads: np.ndarray = (counts / np.maximum(copies, 1))[placed].sum(1)
    return loads


def balancedness(counts: np.ndarray, placed: np.ndarray) -> float:
    """A rank's tokens on average by those of the busiest: 1 where all have equally many."""
    loads = rank_loads(counts, placed)
    return float(loads.mean() / loads.max()) if loads.max() else 1.0


def _copies(counts: np.ndarray, slots: int, ranks: int) -> np.ndarray:
    """How often each expert is held, at most once on a rank if there are experts enough."""
    copies = np.ones(len(counts), dtype=np.int64)
    for _ in range(slots - len(counts)):
        shares = counts / copies
        shares[copies >= ranks] = -1
        copies[int(shares.argmax()) if shares.max() >= 0 else int(copies.argmin())] += 1
    return copies


def _settled(wanted: Sequence[int], before: np.ndarray) -> list[int]:
    """The experts of a rank in its slots, those that were there where they were."""
    coming = list(wanted)
    slots: list[int | None] = []
    for expert in before.tolist():
        stays = expert in coming
        if stays:
            coming.remove(expert)
        slots.append(expert if stays else None)
    return [coming.pop(0) if expert is None else expert for expert in slots]
