"""How one model is spread over devices and processes."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["ParallelConfig"]


@flag_group
class ParallelConfig(FlagGroup):
    """How one model is spread over devices and processes."""

    title = "ParallelConfig"

    distributed_executor_backend: str | None = flag(
        None, "Executor of the workers. Default: by the number of ranks.", kind="executors"
    )
    tensor_parallel_size: int = flag(
        1, "Number of ranks that each layer is split over.", least=1, aliases=("-tp",), common=True
    )
    pipeline_parallel_size: int = flag(
        1, "Number of pipeline stages.", least=1, aliases=("-pp",), common=True
    )
    pipeline_layer_partition: tuple[int, ...] = flag(
        (), "Number of layers of each stage, in order. Default: stages of equal size in bytes."
    )
    decode_context_parallel_size: int = flag(
        1,
        "Tensor-parallel ranks that split a sequence's KV cache instead of replicating it.",
        least=1,
        aliases=("-dcp",),
    )
    cp_kv_cache_interleave_size: int = flag(
        1,
        "Number of consecutive tokens in the KV cache of the same rank.",
        unit="tokens",
        least=1,
        aliases=("--dcp-kv-cache-interleave-size",),
    )
    enable_expert_parallel: bool = flag(
        False,
        "Place whole experts on each rank of all replicas, instead of splitting every expert.",
        aliases=("-ep",),
    )
    worker_cls: str = flag(
        "auto", "Worker class, a subclass of modulm.engine.worker.worker.Worker: pkg.mod:Class."
    )
    worker_extension_cls: str | None = flag(
        None, "Class with more methods for workers, for collective_rpc: pkg.mod:Class."
    )
    data_parallel_size: int = flag(
        1, "Number of replicas, each with its own KV cache.", least=1, aliases=("-dp",), common=True
    )
    data_parallel_size_local: int | None = flag(
        None, "Number of replicas on this machine. Default: all.", least=0, aliases=("-dpl",)
    )
    data_parallel_rank_local: int = flag(
        0, "Index of this replica on its machine; `modulm serve` sets it.", least=0
    )
    data_parallel_group: str | None = flag(
        None, "Folder in which replicas that share experts meet; `modulm serve` sets it."
    )
    disable_frontend_multiprocessing: bool = flag(False, "Run the engine in the server's process.")

    @property
    def ranks(self) -> int:
        """Number of workers of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def shared_experts(self) -> bool:
        """Whether the experts are distributed over the ranks of all replicas."""
        return self.enable_expert_parallel and self.data_parallel_size > 1
