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
    tensor_parallel_size: int = flag(
        1, "Ranks that share each layer.", least=1, aliases=("-tp",), common=True
    )
    pipeline_parallel_size: int = flag(
        1,
        "Stages of layers, which run one after the other.",
        least=1,
        aliases=("-pp",),
        common=True,
    )
    disable_frontend_multiprocessing: bool = flag(False, "Run engine and server in one process.")

    @property
    def ranks(self) -> int:
        """Workers that one replica of the model takes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size
