"""How one model is spread over devices and processes."""

from __future__ import annotations

from modulm.config.schema.flags import FlagGroup, flag, flag_group

__all__ = ["ParallelConfig"]


@flag_group
class ParallelConfig(FlagGroup):
    """How one model is spread over devices and processes."""

    title = "ParallelConfig"

    distributed_executor_backend: str | None = flag(
        None, "Executor that runs the workers; None: by world size.", kind="executors"
    )
    disable_frontend_multiprocessing: bool = flag(False, "Run engine and server in one process.")
