"""The flags of profiles."""

from __future__ import annotations

from modulm.config.schema.flags import FlagGroup, flag, flag_group

__all__ = ["ProfilerConfig"]


@flag_group
class ProfilerConfig(FlagGroup):
    """What is recorded of the engine's steps between /start_profile and /stop_profile."""

    title = "ProfilerConfig"
    table = "profiler_config"

    profiler: str | None = flag(
        None, "What records: torch's profiler. None: profiles cannot be taken.",
        choices=("torch",), key="profiler", own=False,
    )  # fmt: skip
    torch_profiler_dir: str | None = flag(
        None, "Folder of the traces, which Perfetto and chrome://tracing show. None: ./profiles.",
        unit="path", key="torch_profiler_dir", own=False,
    )  # fmt: skip
    torch_profiler_with_stack: bool = flag(
        True, "Record which code called an operation.",
        key="torch_profiler_with_stack", own=False,
    )  # fmt: skip
    torch_profiler_record_shapes: bool = flag(
        False, "Record the shapes of inputs.", key="torch_profiler_record_shapes", own=False
    )
    torch_profiler_with_memory: bool = flag(
        False, "Record what is allocated.", key="torch_profiler_with_memory", own=False
    )
    torch_profiler_with_flops: bool = flag(
        False, "Estimate floating-point operations.", key="torch_profiler_with_flops", own=False
    )
    torch_profiler_use_gzip: bool = flag(
        True, "Compress traces.", key="torch_profiler_use_gzip", own=False
    )
    delay_iterations: int = flag(
        0, "Steps that are left out at first.", least=0, key="delay_iterations", own=False
    )
    max_iterations: int = flag(
        0, "Steps after which recording ends by itself; 0 for no bound.",
        least=0, key="max_iterations", own=False,
    )  # fmt: skip
