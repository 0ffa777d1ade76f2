"""One device, one process: plans run where the engine runs."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

from modulm.contracts.executor import Capacity, Executor, Plan, StepResult
from modulm.errors import EngineError, UnsupportedError

if TYPE_CHECKING:
    from modulm.engine.runner import Runner

__all__ = ["UniExecutor"]


class UniExecutor(Executor):
    """Loads the checkpoint and runs plans in the calling thread, or in one worker for `submit`."""

    name: ClassVar[str] = "uni"
    api: ClassVar[int | tuple[int, int]] = 1

    def __init__(self) -> None:
        self._runner: Runner | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._description: dict[str, Any] = {}

    def start(self, config: Any) -> Capacity:
        from modulm.config.resolve import choose_platform
        from modulm.engine.runner import Runner
        from modulm.loading import load_model, open_checkpoint
        from modulm.plugins import manager

        plugins = manager.current()
        platform, decision = choose_platform(config, plugins)
        platform.start(threads=config.device.cpu_threads)
        loaded = load_model(config, open_checkpoint(config), platform, plugins)
        self._runner = Runner(config, loaded, platform)
        self._runner.check()
        self._description = {
            "dtype": loaded.dtype,
            "tasks": loaded.tasks,
            "width": loaded.dense[-1].weight.shape[0] if loaded.dense else None,
            "platform": platform.name,
            "device": platform.describe(),
            "weight_bytes": loaded.weight_bytes,
            "decisions": (decision, *loaded.decisions),
        }
        return self._runner.capacity

    def run(self, plan: Plan) -> StepResult:
        if self._runner is None:
            raise EngineError("the executor was not started, or has been stopped")
        return self._runner.run(plan)

    def submit(self, plan: Plan) -> Future[StepResult]:
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="modulm-steps")
        return self._worker.submit(self.run, plan)

    def call(self, name: str, *args: Any) -> Any:
        if name == "describe":
            return self._description
        if name == "check" and self._runner is not None:
            return self._runner.check()
        raise UnsupportedError(f"the uni executor cannot {name}")

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(wait=True)
            self._worker = None
        self._runner = None
