"""Assign experts to ranks, some of them more than once, so that all ranks have the same load.

Like DeepSeek's expert-parallel load balancer (arXiv 2412.19437, 3.4.2): experts chosen by many
tokens get more copies, and copies are assigned in descending order of load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["balancedness", "first_placement", "placement", "rank_loads"]


def first_placement(experts: int, ranks: int, spare: int) -> np.ndarray:
    """Return the initial experts of each slot: [ranks, experts / ranks + spare] int64. Each rank
    has its share of the checkpoint, followed by copies of the next rank's experts.
    """
    experts_by_rank = np.arange(experts).reshape(ranks, -1)
    copies = [np.resize(np.roll(experts_by_rank, -1, 0)[rank], spare) for rank in range(ranks)]
    return np.concatenate(
        [experts_by_rank, np.array(copies, dtype=experts_by_rank.dtype).reshape(ranks, spare)], 1
    )


def placement(counts: Sequence[int] | np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return balanced experts for each slot: [ranks, slots].

    Every expert has a slot, and no rank exceeds the previous maximum load. An expert that stays on
    a rank keeps its slot. counts: [experts], tokens that chose each. before: [ranks, slots], the
    current experts.
    """
    counts, (ranks, slots) = np.asarray(counts, dtype=np.float64), before.shape
    copies = _copies(counts, ranks * slots, ranks)
    shares = counts / copies
    free = np.full(ranks, slots)
    loads = np.zeros(ranks)
    experts_of_ranks: list[list[int]] = [[] for _ in range(ranks)]
    # Heaviest first; of equal loads those with most copies, which fit on the fewest ranks.
    for expert in sorted(range(len(counts)), key=lambda e: (-shares[e], -copies[e], e)):
        for _ in range(copies[expert]):
            open_to = [r for r in range(ranks) if free[r]]
            without = [r for r in open_to if expert not in experts_of_ranks[r]]
            rank = min(without or open_to, key=lambda r: (loads[r], r))
            experts_of_ranks[rank].append(expert)
            loads[rank] += shares[expert]
            free[rank] -= 1
    proposed = np.array(
        [_keep_slots(wanted, there) for wanted, there in zip(experts_of_ranks, before, strict=True)]
    )
    better = rank_loads(counts, proposed).max() < rank_loads(counts, before).max()
    return proposed if better else before


def rank_loads(counts: np.ndarray, placed: np.ndarray) -> np.ndarray:
    """Return the tokens of each rank, [ranks]; the copies of an expert get equal shares."""
    copies = np.bincount(placed.ravel(), minlength=len(counts))
    loads: np.ndarray = (counts / np.maximum(copies, 1))[placed].sum(1)
    return loads


def balancedness(counts: np.ndarray, placed: np.ndarray) -> float:
    """Return the mean load of the ranks divided by the largest: 1 if all are equal."""
    loads = rank_loads(counts, placed)
    return float(loads.mean() / loads.max()) if loads.max() else 1.0


def _copies(counts: np.ndarray, slots: int, ranks: int) -> np.ndarray:
    """Return the number of copies of each expert, at most one per rank if possible."""
    copies = np.ones(len(counts), dtype=np.int64)
    for _ in range(slots - len(counts)):
        shares = counts / copies
        shares[copies >= ranks] = -1
        copies[int(shares.argmax()) if shares.max() >= 0 else int(copies.argmin())] += 1
    return copies


def _keep_slots(experts: Sequence[int], before: np.ndarray) -> list[int]:
    """Assign a rank's experts to its slots; those that stay keep their slots."""
    coming = list(experts)
    slots: list[int | None] = []
    for expert in before.tolist():
        stays = expert in coming
        if stays:
            coming.remove(expert)
        slots.append(expert if stays else None)
    return [coming.pop(0) if expert is None else expert for expert in slots]
