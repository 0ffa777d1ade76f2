"""What planner and runner of adapters tell each other."""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

__all__ = ["AdapterRow", "SlotFills"]

#: (slot, adapter) of adapters that take a slot in a step, before anything runs; slots count from 1.
SlotFills: TypeAlias = tuple[tuple[int, str], ...]


@frozen
class AdapterRow:
    """The adapter of a row, and the first of its tokens that it applies to."""

    name: str
    first: int = 0
