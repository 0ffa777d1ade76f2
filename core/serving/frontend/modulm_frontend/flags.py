"""The flags of outputs and of the profiler."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["OutputConfig", "ProfilerConfig"]


@flag_group
class OutputConfig(FlagGroup):
    """What outputs have besides tokens and text."""

    title = "Outputs"

    return_sampling_mask: bool = flag(
        False,
        "Return the tokens that each token was drawn from, after top-k, top-p and min-p. Needs "
        "--logprobs-mode processed_logprobs, and temperature and top_k above 0 in requests.",
    )


@flag_group
class ProfilerConfig(FlagGroup):
    """Settings of the profiler that /start_profile starts and /stop_profile stops."""

    title = "ProfilerConfig"
    table = "profiler_config"

    profiler: str | None = flag(
        None, "Profiler to use. Default: none, profiling is off.",
        choices=("torch",), key="profiler", nested=True,
    )  # fmt: skip
    torch_profiler_dir: str | None = flag(
        None, "Folder for traces, to open in Perfetto or chrome://tracing. Default: ./profiles.",
        unit="path", key="torch_profiler_dir", nested=True,
    )  # fmt: skip
    torch_profiler_with_stack: bool = flag(
        True, "Record the call stack of each operation.",
        key="torch_profiler_with_stack", nested=True,
    )  # fmt: skip
    torch_profiler_record_shapes: bool = flag(
        False, "Record the shapes of inputs.", key="torch_profiler_record_shapes", nested=True
    )
    torch_profiler_with_memory: bool = flag(
        False, "Record memory allocations.", key="torch_profiler_with_memory", nested=True
    )
    torch_profiler_with_flops: bool = flag(
        False, "Estimate floating-point operations.", key="torch_profiler_with_flops", nested=True
    )
    torch_profiler_use_gzip: bool = flag(
        True, "Compress traces.", key="torch_profiler_use_gzip", nested=True
    )
    delay_iterations: int = flag(
        0, "Steps to skip before recording.", least=0, key="delay_iterations", nested=True
    )
    max_iterations: int = flag(
        0, "Number of steps to record; 0 for no limit.",
        least=0, key="max_iterations", nested=True,
    )  # fmt: skip
