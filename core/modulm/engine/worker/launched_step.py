"""A step launched on a device that queues work."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from modulm.contracts.executor import StepResult

__all__ = ["LaunchedStep"]


class LaunchedStep(Future[StepResult]):
    """A step in flight. Asking for the result waits for it; ask in the order of launches."""

    def __init__(self, finish: Callable[[], StepResult]) -> None:
        super().__init__()
        self._finish = finish

    def result(self, timeout: float | None = None) -> StepResult:
        self._land()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._land()
        return super().exception(timeout)

    def _land(self) -> None:
        if not self.done():
            try:
                self.set_result(self._finish())
            except Exception as error:
                self.set_exception(error)
