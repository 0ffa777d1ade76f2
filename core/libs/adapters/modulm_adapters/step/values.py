"""Values that planner and runner of adapters exchange."""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

__all__ = ["AdapterRow", "SlotFills"]

#: (slot, adapter) to fill before the step runs; slots count from 1.
SlotFills: TypeAlias = tuple[tuple[int, str], ...]


@frozen
class AdapterRow:
    """A row's adapter, and the first token that it applies to."""

    name: str
    first: int = 0
