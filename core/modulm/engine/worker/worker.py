"""Worker: one device's model, caches, sampler and step parts, built from a configuration.

Executors carry plans to workers and results back.
"""

from __future__ import annotations

import gc
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from modulm.config.binding import binding_of, share_of
from modulm.config.resolve import choose_platform
from modulm.contracts.executor import ModelDescription, StepResult
from modulm.contracts.step_part import BuiltModel
from modulm.engine.parts import open_parts, open_runners
from modulm.engine.sampling.logits_processors import class_at
from modulm.engine.worker.model_runner import ModelRunner
from modulm.errors import (
    ConfigError,
    EngineError,
    NotFound,
    PluginNotFound,
    RequestError,
    UnsupportedError,
)
from modulm.loading import load_model, open_checkpoint
from modulm.parallel import Mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from modulm.contracts.adapter import AdapterBank
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.executor import Capacity, Plan
    from modulm.contracts.model import Model
    from modulm.contracts.platform import Platform
    from modulm.contracts.sampling import StructuredOutputs
    from modulm.contracts.step_part import StepPart
    from modulm.engine.kv_cache.sizing import Sizing
    from modulm.loading import Loaded
    from modulm.plugins.manager import PluginManager

__all__ = ["Worker", "worker_class"]

log = logging.getLogger("modulm.worker")


def worker_class(config: EngineConfig) -> type[Worker]:
    """Return the class of `--worker-cls`, with the methods of `--worker-extension-cls`.

    Raises ConfigError if it cannot be imported, or if the extension would override attributes.
    """
    path, extension_path = config.parallel.worker_cls, config.parallel.worker_extension_cls
    worker = Worker if path == "auto" else class_at(path, Worker, "worker_cls")
    if extension_path is None:
        return worker
    extension = class_at(extension_path, object, "worker_extension_cls")
    clashes = [name for name in vars(extension) if hasattr(worker, name) and name[:2] != "__"]
    if clashes:
        raise ConfigError("worker_extension_cls", f"workers have {', '.join(clashes)} already")
    return type(worker.__name__, (worker, extension), {})


class Worker:
    """Loads the model on construction, and runs plans on it.

    config: resolved. parts: the step parts, by default the installed ones that the configuration
    uses. rank: of `config.parallel.ranks`. open_mesh: connects the ranks. share: (index, count) of
    this machine's workers, if not all ranks are on it.

    A sleeping worker has released its caches (level 1), or caches and weights (level 2). After
    waking up it has as many blocks as before.
    """

    def __init__(
        self,
        config: EngineConfig,
        plugins: PluginManager,
        parts: Sequence[StepPart] | None = None,
        rank: int = 0,
        open_mesh: Callable[[Platform], Mesh] | None = None,
        share: tuple[int, int] | None = None,
    ) -> None:
        self.config, self.rank = config, rank
        self.plugins = plugins
        self.parts = open_parts(config, plugins) if parts is None else tuple(parts)
        self.platform, self._chosen = choose_platform(config, plugins)
        slot, slots = share or share_of(config.parallel, rank)
        if slots > 1:
            self.platform.take_share(slot, slots)
        if (binding := binding_of(config.device, slot, slots)) is not None:
            self.platform.bind(binding)
        self.platform.start(threads=config.device.cpu_threads)
        self.mesh = Mesh() if open_mesh is None else open_mesh(self.platform)
        self.loaded: Loaded | None = None
        self._runner: ModelRunner | None = None
        self._sizing: Sizing | None = None
        self._thread: ThreadPoolExecutor | None = None
        self.description = self._build()

    @property
    def runner(self) -> ModelRunner:
        """The runner. Raises EngineError while the worker sleeps or after it was closed."""
        if self._runner is None:
            raise EngineError("the worker sleeps, or has been closed")
        return self._runner

    @property
    def model(self) -> Model:
        """This rank's shard of the model. Raises EngineError while its weights are released."""
        if self.loaded is None:
            raise EngineError("the worker has released its weights")
        return self.loaded.model

    @property
    def capacity(self) -> Capacity:
        """The capacity of its caches."""
        return self.runner.capacity

    def load(self) -> Loaded:
        """Load the model unless it is loaded, without caches."""
        if self.loaded is None:
            checkpoint = open_checkpoint(self.config, self.plugins)
            masks = any(part.masks for part in self.parts)
            self.loaded = load_model(
                self.config, checkpoint, self.platform, self.plugins, self.mesh, masks=masks
            )
        return self.loaded

    def _build(self) -> ModelDescription:
        """Load the model if necessary, and allocate caches, with their former sizes if any."""
        loaded = self.load()
        built = BuiltModel(
            config=self.config,
            loaded=loaded,
            platform=self.platform,
            plugins=self.plugins,
            mesh=self.mesh,
        )
        runner = ModelRunner(
            self.config,
            loaded,
            self.platform,
            self.plugins,
            parts=open_runners(self.parts, built),
            sizing=self._sizing,
            mesh=self.mesh,
        )
        width = runner.check()
        runner.record()
        self._runner, self._sizing = runner, runner.sizing
        return ModelDescription(
            dtype=loaded.dtype,
            tasks=loaded.tasks,
            width=width,
            pooling=dict(loaded.pooling),
            platform=self.platform.name,
            device=self.platform.describe(),
            weight_bytes=loaded.weight_bytes,
            decisions=(self._chosen, *loaded.decisions),
            media_family=loaded.model.media_family,
        )

    def run(self, plan: Plan) -> StepResult:
        """Run one step. An exception fails the whole step."""
        return self.runner.run(plan)

    def submit(self, plan: Plan) -> Future[StepResult]:
        """Start one step: launched directly on devices that queue work, otherwise in a thread."""
        if self.platform.queued:
            try:
                return self.runner.launch(plan)
            except Exception as error:
                failed: Future[StepResult] = Future()
                failed.set_exception(error)
                return failed
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="modulm-steps")
        return self._thread.submit(self.run, plan)

    def check(self) -> None:
        """Raise EngineError if the model no longer works."""
        self.runner.check()

    def prepare(self, request: str, constraint: StructuredOutputs) -> Future[None]:
        """See `Executor.prepare`."""
        ready = (part.prepare(request, constraint) for part in self.parts)
        future = next((each for each in ready if each is not None), None)
        if future is None:
            raise UnsupportedError("no installed step part compiles constraints on text")
        return future

    def forget(self, request: str) -> None:
        """See `Executor.forget`."""
        for part in self.parts:
            part.forget(request)

    def add_adapter(self, name: str, path: Path) -> None:
        """See `Executor.add_adapter`."""
        self._bank.add(name, path)

    def prepare_adapter(self, name: str) -> None:
        """See `Executor.prepare_adapter`."""
        self._bank.prepare(name)

    def remove_adapter(self, name: str) -> None:
        """See `Executor.remove_adapter`."""
        self._bank.remove(name)

    def call(
        self,
        function: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function with this worker, after all submitted steps; see `Executor.call`.

        Raises EngineError if the function raises.
        """
        run = partial(self._find_function(function), *args, **kwargs or {})
        try:
            return run() if self._thread is None else self._thread.submit(run).result()
        except Exception as error:
            log.exception("a call into the worker of rank %d failed", self.rank)
            name = getattr(function, "__qualname__", function)
            raise EngineError(f"{name} raised {type(error).__name__}: {error}") from error

    def _find_function(self, function: str | Callable[..., Any]) -> Callable[..., Any]:
        """Resolve the function of a call and bind it to this worker.

        Methods may be called only if `--worker-cls` or `--worker-extension-cls` adds them.
        """
        if not isinstance(function, str):
            return partial(function, self)
        if ":" in function:
            try:
                return partial(resolve_name(function), self)
            except (ImportError, AttributeError, ValueError) as error:
                raise RequestError(f"{function} cannot be imported: {error}", "method") from error
        if not function.startswith("_") and not hasattr(Worker, function):
            method: Callable[..., Any] | None = getattr(self, function, None)
            if callable(method):
                return method
        try:
            return partial(self.plugins.load("worker_functions", function), self)
        except PluginNotFound as error:
            raise NotFound(f"{error}; the worker has no such method either", "method") from error

    @property
    def _bank(self) -> AdapterBank:
        bank = None if self.loaded is None else self.loaded.adapters
        if bank is None:
            raise UnsupportedError("adapters: --plugin-config has no table for them")
        return bank

    def sleep(self, level: int) -> None:
        """Release the caches (level 1), or the caches and the weights (level 2)."""
        self._close_runner()
        if level > 1:
            self._unload()
        self._release_memory()

    def wake_up(self) -> None:
        """Reload and allocate what `sleep` released."""
        if self._runner is None:
            self._build()

    def close(self) -> None:
        """Release everything; may be called twice."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        self._close_runner()
        self._unload()
        for part in self.parts:
            part.close()
        if self.platform.queued:
            self._release_memory()

    def _release_memory(self) -> None:
        """Collect garbage: recordings and hooks form reference cycles that hold the caches."""
        gc.collect()
        self.platform.empty_cache()

    def _close_runner(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _unload(self) -> None:
        for part in self.parts:
            part.unload()
        self.loaded = None
