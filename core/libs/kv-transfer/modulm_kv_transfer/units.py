"""Units in which blocks are moved.

Cache groups may have blocks of several sizes. A unit is the shortest run of tokens that is whole
blocks in all of them. A prefix is reused up to the end of a unit, so of recurrent states a unit has
the one after its last token, and of sliding windows the blocks that the token behind it sees.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import lcm
from typing import TypeVar

import numpy as np

from modulm.contracts.executor import GroupCapacity

__all__ = ["BlockUnits"]

T = TypeVar("T")


class BlockUnits:
    """The blocks of units. groups: the engine's cache groups; each has block names.

    size: tokens of a unit. parts: for each entry of `BlockTransfer.blocks`, its cache group, and
    which of the unit's blocks in this group it is. states: groups of recurrent states.
    """

    def __init__(self, groups: Sequence[GroupCapacity]) -> None:
        self.size = lcm(*(group.block_size for group in groups))
        self.states = tuple(i for i, group in enumerate(groups) if group.kind == "state")
        self._counts = [self.size // group.block_size for group in groups]
        self._named = self.size // min((group.block_size for group in groups), default=1)
        self.parts = tuple(
            (index, place)
            for index, (group, count) in enumerate(zip(groups, self._counts, strict=True))
            for place in range(max(0, count - _lookback(group)), count)
        )

    def names(self, blocks: Sequence[bytes]) -> Sequence[bytes]:
        """Return the names of units. blocks: those of the smallest blocks."""
        return blocks if self._named == 1 else blocks[self._named - 1 :: self._named]

    def columns(self, part: int, units: Sequence[int]) -> np.ndarray:
        """Return where a part's blocks of these units are in a block table."""
        group, place = self.parts[part]
        columns: np.ndarray = np.asarray(units, dtype=np.int64) * self._counts[group] + place
        return columns

    def arrange(self, groups: Mapping[int, T]) -> dict[int, T]:
        """Return what belongs to cache groups by index in `BlockTransfer.blocks`."""
        return {
            number: groups[group]
            for number, (group, _) in enumerate(self.parts)
            if group in groups
        }  # fmt: skip


def _lookback(group: GroupCapacity) -> int:
    """Return how many of the last blocks before a token it depends on."""
    if group.kind == "state":
        return 1
    if group.window is None:
        return sys.maxsize
    return max(1, -(-(group.window - 1) // group.block_size))
