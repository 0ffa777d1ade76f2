"""Calls of functions in workers, for all front ends."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from modulm.errors import RequestError

if TYPE_CHECKING:
    from modulm.contracts.executor import WorkerHandle

__all__ = ["check_call", "run_on_model"]


def check_call(method: str | Callable[..., Any], timeout: float | None) -> None:
    """Raise RequestError for an invalid call. Strings never import: they may come from clients."""
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


def run_on_model(worker: WorkerHandle, function: str | Callable[..., Any]) -> Any:
    """Call a function with the worker's model; itself a worker function.

    Functions cross process boundaries by name, "module:name". Only callers that pass a function
    object can use such names.
    """
    called = resolve_name(function) if isinstance(function, str) else function
    return called(worker.model)
