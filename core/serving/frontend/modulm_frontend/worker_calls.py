"""Calls into workers, as front ends take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modulm.errors import RequestError

__all__ = ["check_call"]


def check_call(method: str | Callable[..., Any], timeout: float | None) -> None:
    """Raise RequestError for what cannot be called. A text is a name and never imports anything:
    it may come from a stranger.
    """
    if isinstance(method, str) and (":" in method or not method):
        raise RequestError(
            f"{method!r} is not the name of a worker function or method; to call a function of a "
            "module, pass the function itself",
            "method",
        )
    if not (isinstance(method, str) or callable(method)):
        raise RequestError("method must be a name or a function", "method")
    if timeout is not None and timeout <= 0:
        raise RequestError("timeout must be more than 0 seconds", "timeout")
