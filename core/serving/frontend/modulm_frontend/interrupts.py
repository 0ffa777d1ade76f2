"""Delays Ctrl-C until a step ends, since interrupting one corrupts the engine's state."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]

#: Interrupts to delay within one step. The next one is raised immediately.
_PATIENCE = 3


class Interrupts:
    """Delays SIGINT during steps and then calls the previous handler.

    broken: called before an interrupt is raised within a step.
    """

    def __init__(self, broken: Callable[[], None]) -> None:
        self._broken = broken
        self._steps = 0
        self._pending = 0
        self._previous: Any = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Handle SIGINT within this context, if called on the main thread."""
        previous = signal.getsignal(signal.SIGINT)
        nested = previous == self._handle
        is_main = threading.current_thread() is threading.main_thread()
        if nested or not is_main or not callable(previous):
            yield
            return
        self._previous, self._pending = previous, 0
        signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Delay interrupts until this context ends."""
        self._steps += 1
        try:
            yield
        finally:
            self._steps -= 1
            if self._pending and not self._steps:
                self._pending = 0
                self._previous(signal.SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._steps:
            self._pending += 1
            if self._pending < _PATIENCE:
                return
            self._pending = 0
            self._broken()
        self._previous(number, frame)
