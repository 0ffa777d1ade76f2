"""What an estimate assumes while it is made."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from modulm.contracts.platform import Memory
    from modulm.errors import CheckpointError

__all__ = ["assumed_memory", "making_proposals", "proposal_estimate", "refusal"]

#: Memory of each device, instead of the platform's.
assumed_memory: ContextVar[Memory | None] = ContextVar("assumed_memory", default=None)
#: Whether estimates are made to propose settings, so that they propose none themselves.
making_proposals: ContextVar[bool] = ContextVar("making_proposals", default=False)
#: Makes the error about weights that do not fit, for the configuration resolved last.
refusal: ContextVar[Callable[[], CheckpointError] | None] = ContextVar("refusal", default=None)
#: The last estimate that was made to propose settings.
proposal_estimate: ContextVar[Any] = ContextVar("proposal_estimate", default=None)
