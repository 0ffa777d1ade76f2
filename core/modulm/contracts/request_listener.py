"""Request listener: is told of requests that have ended (hook `modulm_request_listeners`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

__all__ = ["API", "RequestListener"]

API = 1


class RequestListener(ABC):
    """Whoever wants to know of each request when it has ended."""

    @abstractmethod
    def ended(self, request: Any) -> None:
        """A request has ended. `request`: `modulm.contracts.outputs.Finished`. Be quick."""
