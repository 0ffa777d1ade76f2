"""Ctrl-C between steps: an interrupt within one would leave the engine's bookkeeping half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]

#: Interrupts that one step is allowed to outlast. The next is raised at once.
_PATIENCE = 3


class Interrupts:
    """Delays SIGINT while a step runs, and delivers it to the handler that was there before.

    broken: called before an interrupt is delivered within a step, because the user insists and the
    step does not end.
    """

    def __init__(self, broken: Callable[[], None]) -> None:
        self._broken = broken
        self._steps = 0
        self._pending = 0
        self._previous: Any = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Handle SIGINT within this context, if the caller is on the thread that gets it."""
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
