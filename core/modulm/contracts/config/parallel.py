"""How one model is spread over devices and processes."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

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
    pipeline_layer_partition: tuple[int, ...] = flag(
        (), "Layers of each stage, from the first one on; none given: as even in bytes as can be."
    )
    decode_context_parallel_size: int = flag(
        1,
        "Tensor ranks that share out the cached tokens of a sequence where they would hold the "
        "same.",
        least=1,
        aliases=("-dcp",),
    )
    cp_kv_cache_interleave_size: int = flag(
        1,
        "Neighbouring tokens that one of these ranks keeps.",
        unit="tokens",
        least=1,
        aliases=("--dcp-kv-cache-interleave-size",),
    )
    enable_expert_parallel: bool = flag(
        False,
        "Give each tensor rank, of all replicas, whole experts, not a part of every one.",
        aliases=("-ep",),
    )
    worker_cls: str = flag(
        "auto", "A subclass of modulm.engine.worker.worker.Worker of your own: pkg.mod:Class."
    )
    worker_extension_cls: str | None = flag(
        None, "A class whose methods workers have too, for collective_rpc: pkg.mod:Class."
    )
    data_parallel_size: int = flag(
        1, "Replicas of the model, each with its own cache.", least=1, aliases=("-dp",), common=True
    )
    data_parallel_size_local: int | None = flag(
        None, "Replicas on this machine, which share it; None: all.", least=0, aliases=("-dpl",)
    )
    data_parallel_rank_local: int = flag(
        0, "Which of those this one is; `modulm serve` sets it for each.", least=0
    )
    data_parallel_group: str | None = flag(
        None, "Where replicas that share experts find one another; `modulm serve` sets it."
    )
    disable_frontend_multiprocessing: bool = flag(False, "Run engine and server in one process.")

    @property
    def ranks(self) -> int:
        """Number of workers of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def shared_experts(self) -> bool:
        """Whether the experts are distributed over the ranks of all replicas."""
        return self.enable_expert_parallel and self.data_parallel_size > 1
