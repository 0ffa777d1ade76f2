"""Request listener: called for each request that has ended (hook `modulm_request_listeners`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

__all__ = ["API", "RequestListener"]

API = 1


class RequestListener(ABC):
    """Receives each request when it has ended."""

    @abstractmethod
    def ended(self, request: Any) -> None:
        """Handle a request that has ended. Must be fast.

        request: a `modulm.contracts.outputs.Finished`.
        """
