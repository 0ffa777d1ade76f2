"""What an estimate assumes while it is made."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modulm.contracts.platform import Memory

__all__ = ["assumed_memory", "making_proposals"]

#: Memory of each device, instead of the platform's.
assumed_memory: ContextVar[Memory | None] = ContextVar("assumed_memory", default=None)
#: Whether estimates are made to propose settings, so that they propose none themselves.
making_proposals: ContextVar[bool] = ContextVar("making_proposals", default=False)
