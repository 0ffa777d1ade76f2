"""One device, one process: plans run where the engine runs."""

from __future__ import annotations

import gc
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

from modulm.contracts.executor import Capacity, Executor, Plan, StepResult
from modulm.errors import EngineError, UnsupportedError

if TYPE_CHECKING:
    from modulm.contracts.platform import Platform
    from modulm.engine.kv_cache.sizing import Sizing
    from modulm.engine.worker.model_runner import ModelRunner
    from modulm.loading import Loaded

__all__ = ["UniExecutor"]


class UniExecutor(Executor):
    """Loads the checkpoint and runs plans in the calling thread, or in one worker for `submit`.

    Asleep, it has released its caches (level 1) and its weights as well (level 2); awake again, it
    has as many blocks as before.
    """

    name: ClassVar[str] = "uni"
    api: ClassVar[int | tuple[int, int]] = 2

    def __init__(self) -> None:
        self._runner: ModelRunner | None = None
        self._loaded: Loaded | None = None
        self._platform: Platform | None = None
        self._config: Any = None
        self._worker: ThreadPoolExecutor | None = None
        self._description: dict[str, Any] = {}
        self._width = 0

    def start(self, config: Any) -> Capacity:
        from modulm.config.binding import binding_of
        from modulm.config.resolve import choose_platform
        from modulm.plugins import manager

        platform, decision = choose_platform(config, manager.current())
        binding = binding_of(config.device)
        if binding is not None:
            platform.bind(binding)
        platform.start(threads=config.device.cpu_threads)
        self._config, self._platform = config, platform
        loaded, runner = self._build(platform, None)
        self._description = {
            "dtype": loaded.dtype,
            "tasks": loaded.tasks,
            "width": self._width,
            "pooling": dict(loaded.pooling),
            "platform": platform.name,
            "device": platform.describe(),
            "weight_bytes": loaded.weight_bytes,
            "decisions": (decision, *loaded.decisions),
        }
        return runner.capacity

    def _build(self, platform: Platform, sizing: Sizing | None) -> tuple[Loaded, ModelRunner]:
        """Load what is not loaded, and a runner with its caches; sizing: as they were before."""
        from modulm.engine.worker.model_runner import ModelRunner
        from modulm.loading import load_model, open_checkpoint
        from modulm.plugins import manager

        loaded = self._loaded
        if loaded is None:
            checkpoint = open_checkpoint(self._config)
            loaded = load_model(self._config, checkpoint, platform, manager.current())
        runner = ModelRunner(self._config, loaded, platform, sizing)
        self._width = runner.check()
        self._loaded, self._runner = loaded, runner
        return loaded, runner

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
        if name == "sleep" and self._runner is not None:
            return self._sleep(*args)
        if name == "wake_up" and self._platform is not None:
            return self._build(self._platform, *args)[1].capacity
        raise UnsupportedError(f"the uni executor cannot {name}")

    def _sleep(self, level: int) -> Sizing | None:
        """Release memory; what `wake_up` has to be told."""
        sizing = None if self._runner is None else self._runner.sizing
        self._runner = None
        if level > 1:
            self._loaded = None
        gc.collect()
        if self._platform is not None:
            self._platform.empty_cache()
        return sizing

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(wait=True)
            self._worker = None
        self._runner = self._loaded = None
