"""One device: the worker runs in the engine's process."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from modulm.contracts.executor import Capacity, Executor, ModelDescription, Plan, StepResult
from modulm.errors import EngineError, EngineTimeout
from modulm_distributed.worker_calls import TimedCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.sampling import StructuredOutputs
    from modulm.engine.worker.worker import Worker

__all__ = ["UniExecutor"]


class UniExecutor(Executor):
    """A worker in this process."""

    name: ClassVar[str] = "uni"
    api: ClassVar[int | tuple[int, int]] = 3

    def __init__(self) -> None:
        self._loaded: Worker | None = None
        self._timed = TimedCalls()

    def start(self, config: EngineConfig) -> Capacity:
        from modulm.engine.worker.worker import worker_class
        from modulm.plugins import manager

        self._loaded = worker_class(config)(config, manager.current())
        return self._loaded.capacity

    @property
    def _worker(self) -> Worker:
        if self._loaded is None:
            raise EngineError("the executor was not started, or has been stopped")
        self._timed.wait()
        return self._loaded

    def run(self, plan: Plan) -> StepResult:
        return self._worker.run(plan)

    def submit(self, plan: Plan) -> Future[StepResult]:
        return self._worker.submit(plan)

    def describe(self) -> ModelDescription:
        return self._worker.description

    def prepare(self, request: str, constraint: StructuredOutputs) -> Future[None]:
        return self._worker.prepare(request, constraint)

    def forget(self, request: str) -> None:
        self._worker.forget(request)

    def check(self) -> None:
        self._worker.check()

    def sleep(self, level: int) -> None:
        self._worker.sleep(level)

    def wake_up(self) -> None:
        self._worker.wake_up()

    def add_adapter(self, name: str, path: Path) -> None:
        self._worker.add_adapter(name, path)

    def prepare_adapter(self, name: str) -> None:
        self._worker.prepare_adapter(name)

    def remove_adapter(self, name: str) -> None:
        self._worker.remove_adapter(name)

    def call(
        self,
        function: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        name = getattr(function, "__qualname__", str(function))
        call = partial(self._worker.call, function, args, kwargs)
        try:
            return [self._timed.run(name, call, timeout)]
        except EngineTimeout:
            raise
        except EngineError as error:
            raise EngineError(f"worker 0: {error}") from error

    def stop(self) -> None:
        self._timed.close()
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None
