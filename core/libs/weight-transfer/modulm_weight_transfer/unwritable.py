"""Models whose weights cannot be updated in the running engine."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from modulm.errors import UnsupportedError

__all__ = ["check_updatable", "refuse_updates"]

_REASONS: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def refuse_updates(model: Any, reason: str) -> None:
    """Refuse updates of a loaded model. reason: for the message."""
    _REASONS[model] = reason


def check_updatable(model: Any) -> None:
    """Raise UnsupportedError for a model whose updates are refused."""
    if (reason := _REASONS.get(model)) is not None:
        raise UnsupportedError(reason)
