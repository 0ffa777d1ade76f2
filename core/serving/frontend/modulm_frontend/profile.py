"""Profiles of an engine's steps, taken on request; while none is taken nothing is in the way."""

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
    """One engine's profile. Both methods are called on the engine's thread, between two steps."""

    def __init__(self, core: EngineCore) -> None:
        self._executor = core.executor
        self._config = core.config.group(ProfilerConfig)
        self._recorder: Any = None
        self._taking = False
        self._steps = 0

    def start(self) -> None:
        """Record from now on. Raises UnsupportedError without --profiler-config, RequestError if
        a profile is being taken or its folder cannot be made.
        """
        if self._config.profiler is None:
            raise UnsupportedError(
                "profiles cannot be taken: start the engine with --profiler-config "
                '\'{"profiler": "torch", "torch_profiler_dir": "FOLDER"}\''
            )
        if self._taking:
            raise RequestError("a profile is being taken: stop it first")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"the folder of profiles cannot be made: {error.strerror}"
            ) from error
        self._taking, self._steps = True, 0
        self._executor.run = self._run  # type: ignore[method-assign]
        if not self._config.delay_iterations:
            self._begin()

    def stop(self) -> None:
        """Write what was recorded. Raises RequestError if nothing is."""
        if not self._taking:
            raise RequestError("no profile is being taken: start one first")
        self._taking = False
        del self._executor.run
        self._end()

    @property
    def _folder(self) -> Path:
        return Path(self._config.torch_profiler_dir or "profiles").expanduser()

    def _run(self, plan: Plan) -> StepResult:
        """A step of the executor, with a name of its own in the trace."""
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
        """Write the trace, if one was begun and is not written."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()


def _devices() -> list[Any]:
    """What else than the processor can be recorded here."""
    from torch.profiler import ProfilerActivity, supported_activities

    return sorted(supported_activities() - {ProfilerActivity.CPU}, key=str)  # type: ignore[no-untyped-call]
