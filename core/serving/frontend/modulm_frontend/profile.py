"""Profiles an engine's steps on request; costs nothing while no profile is running."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.errors import RequestError, UnsupportedError
from modulm_frontend.flags import ProfilerConfig

if TYPE_CHECKING:
    from modulm.contracts.executor import Plan, StepResult
    from modulm.engine.core.engine_core import EngineCore

__all__ = ["StepProfile"]


class StepProfile:
    """One engine's profile. Call its methods on the engine's thread, between two steps."""

    def __init__(self, core: EngineCore) -> None:
        self._executor = core.executor
        self._config = core.config.group(ProfilerConfig)
        self._recorder: Any = None
        self._running = False
        self._steps = 0

    def start(self) -> None:
        """Start recording. Raises UnsupportedError without --profiler-config, RequestError if a
        profile is running or its folder cannot be created.
        """
        if self._config.profiler is None:
            raise UnsupportedError(
                "profiling is off: start the engine with --profiler-config "
                '\'{"profiler": "torch", "torch_profiler_dir": "FOLDER"}\''
            )
        if self._running:
            raise RequestError("a profile is already running: stop it first")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"the profile folder cannot be created: {error.strerror}") from error
        self._running, self._steps = True, 0
        self._executor.run = self._run  # type: ignore[method-assign]
        if not self._config.delay_iterations:
            self._begin()

    def stop(self) -> None:
        """Stop recording and write the trace. Raises RequestError if no profile is running."""
        if not self._running:
            raise RequestError("no profile is running: start one first")
        self._running = False
        del self._executor.run
        self._end()

    @property
    def _folder(self) -> Path:
        return Path(self._config.torch_profiler_dir or "profiles").expanduser()

    def _run(self, plan: Plan) -> StepResult:
        """Run a step of the executor, named in the trace."""
        import torch

        config = self._config
        self._steps += 1
        if config.delay_iterations and self._steps == config.delay_iterations + 1:
            self._begin()
        recorded = self._steps - config.delay_iterations
        with torch.profiler.record_function(f"modulm step {self._steps}"):
            result = type(self._executor).run(self._executor, plan)
        if config.max_iterations and recorded == config.max_iterations:
            self._end()
        return result

    def _begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

        config = self._config
        self._recorder = profile(
            activities=[ProfilerActivity.CPU, *_devices()],
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_stack=config.torch_profiler_with_stack,
            with_flops=config.torch_profiler_with_flops,
            on_trace_ready=tensorboard_trace_handler(
                str(self._folder), "modulm", config.torch_profiler_use_gzip
            ),
        )
        self._recorder.start()

    def _end(self) -> None:
        """Write the trace, unless it is already written."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()


def _devices() -> list[Any]:
    """The activities besides the CPU that can be recorded on this machine."""
    from torch.profiler import ProfilerActivity, supported_activities

    return sorted(supported_activities() - {ProfilerActivity.CPU}, key=str)  # type: ignore[no-untyped-call]
