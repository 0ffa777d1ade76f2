"""How one model is spread over devices and processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.config.schema.flags import State, equip, flag, later, no_effect, refused

__all__ = ["ParallelConfig"]

_SHARDED = later("models over several devices")
_REPLICAS = later("several replicas of a model")
_EXPERTS = later("experts over several devices")
_ALONE: State = no_effect("one device takes part, so there is nothing to reduce or exchange")


@frozen(kw_only=True, field_transformer=equip)
class ParallelConfig:
    """How one model is spread over devices and processes."""

    TITLE: ClassVar[str] = "ParallelConfig"
    TABLE: ClassVar[str | None] = None

    distributed_executor_backend: str | None = flag(
        None, "Executor that runs the workers; None: by world size.", kind="executors"
    )
    tensor_parallel_size: int = flag(
        1, "Devices that share each layer.", least=1, aliases=("-tp",), state=_SHARDED
    )
    pipeline_parallel_size: int = flag(
        1, "Groups of devices that take layers in turn.", least=1, aliases=("-pp",), state=_SHARDED
    )
    decode_context_parallel_size: int = flag(
        1, "Devices that share a sequence's cache.", least=1, aliases=("-dcp",), state=_SHARDED
    )
    prefill_context_parallel_size: int = flag(
        1, "Devices that share a prompt.", least=1, aliases=("-pcp",), state=_SHARDED
    )
    dcp_comm_backend: str | None = flag(None, "Exchange between them.", state=_SHARDED)
    dcp_q_replicate: bool | None = flag(None, "Give each of them all queries.", state=_SHARDED)
    dcp_kv_cache_interleave_size: int = flag(
        1, "Tokens in turn per device.", least=1, state=_SHARDED
    )
    cp_kv_cache_interleave_size: int | None = flag(
        None, "Tokens in turn per device.", least=1, state=_SHARDED
    )
    data_parallel_size: int = flag(
        1, "Replicas of the model.", least=1, aliases=("-dp",), state=_REPLICAS
    )
    data_parallel_rank: int | None = flag(
        None, "Which replica this is.", least=0, aliases=("-dpn",), state=_REPLICAS
    )
    data_parallel_start_rank: int | None = flag(
        None, "First replica of this node.", least=0, aliases=("-dpr",), state=_REPLICAS
    )
    data_parallel_size_local: int | None = flag(
        None, "Replicas on this node.", least=0, aliases=("-dpl",), state=_REPLICAS
    )
    data_parallel_address: str | None = flag(
        None, "Address of the first node.", aliases=("-dpa",), state=_REPLICAS
    )
    data_parallel_rpc_port: int | None = flag(
        None, "Port of the first node.", aliases=("-dpp",), state=_REPLICAS
    )
    data_parallel_backend: str = flag(
        "mp", "What starts the replicas.", aliases=("-dpb",), state=_REPLICAS
    )
    data_parallel_hybrid_lb: bool = flag(
        False, "Balance inside a node, leave nodes to others.", aliases=("-dph",), state=_REPLICAS
    )
    data_parallel_external_lb: bool = flag(
        False, "Leave balancing to others.", aliases=("-dpe",), state=_REPLICAS
    )
    data_parallel_multi_port_external_lb: bool = flag(
        False, "The same with a port per replica.", aliases=("-dpm",), state=_REPLICAS
    )
    disable_nccl_for_dp_synchronization: bool | None = flag(
        None, "Agree between replicas on the host.", state=_ALONE
    )
    dp_sync_interval: int = flag(16, "Steps between agreements.", least=1, state=_ALONE)
    nnodes: int = flag(1, "Machines that take part.", least=1, aliases=("-n",), state=_SHARDED)
    node_rank: int = flag(0, "Which machine this is.", least=0, aliases=("-r",), state=_SHARDED)
    master_addr: str = flag("127.0.0.1", "Address of the first machine.", state=_ALONE)
    master_port: int = flag(29501, "Port of the first machine.", least=1, most=65535, state=_ALONE)
    distributed_timeout_seconds: int | None = flag(
        None, "Wait for a peer.", unit="s", least=1, state=_ALONE
    )
    cpu_distributed_timeout_seconds: int | None = flag(
        None, "Wait for a peer on the host.", unit="s", least=1, state=_ALONE
    )
    device_ids: tuple[str, ...] | None = flag(None, "Devices to use.", state=_SHARDED)
    enable_expert_parallel: bool = flag(
        False, "Give each device whole experts.", aliases=("-ep",), state=_EXPERTS
    )
    enable_hc_sp: bool = flag(False, "Share tokens between layers' parts.", state=_SHARDED)
    enable_batch_sharded_sampling: bool | None = flag(
        None, "Sample on all devices.", state=_SHARDED
    )
    enable_ep_weight_filter: bool = flag(False, "Read only own experts.", state=_EXPERTS)
    all2all_backend: str = flag(
        "allgather_reducescatter", "Exchange between experts.", state=_EXPERTS
    )
    enable_dbo: bool = flag(False, "Overlap two halves of a batch.", state=_EXPERTS)
    ubatch_size: int = flag(0, "Parts of a batch that overlap.", least=0, state=_EXPERTS)
    dbo_decode_token_threshold: int = flag(
        32, "Tokens from which answers overlap.", unit="tokens", least=0, state=_EXPERTS
    )
    dbo_prefill_token_threshold: int = flag(
        512, "Tokens from which prompts overlap.", unit="tokens", least=0, state=_EXPERTS
    )
    enable_shm_tensor_arena: bool = flag(False, "Pass tensors in shared memory.", state=_SHARDED)
    enable_elastic_ep: bool = flag(False, "Let replicas come and go.", state=_EXPERTS)
    elastic_ep_max_dp_size: int | None = flag(None, "Most replicas.", least=1, state=_EXPERTS)
    enable_eplb: bool = flag(False, "Move experts to where there is room.", state=_EXPERTS)
    eplb_config: Mapping[str, Any] = flag({}, "How experts are moved.", state=_EXPERTS)
    num_redundant_experts: int | None = flag(
        None, "Copies of busy experts.", deprecated="use --eplb-config", state=_EXPERTS
    )
    eplb_window_size: int | None = flag(
        None, "Steps that are counted.", deprecated="use --eplb-config", state=_EXPERTS
    )
    eplb_step_interval: int | None = flag(
        None, "Steps between moves.", deprecated="use --eplb-config", state=_EXPERTS
    )
    eplb_log_balancedness: bool | None = flag(
        None, "Log the balance.", deprecated="use --eplb-config", state=_EXPERTS
    )
    expert_placement_strategy: str = flag(
        "linear", "Which expert goes where.", choices=("linear", "round_robin"), state=_EXPERTS
    )
    max_parallel_loading_workers: int | None = flag(
        None,
        "Workers that load at once.",
        least=1,
        state=no_effect("one process loads the weights"),
    )
    ray_workers_use_nsight: bool = flag(
        False, "Profile Ray workers.", state=later("an executor on Ray")
    )
    disable_custom_all_reduce: bool = flag(
        False, "Reduce with the library's own routine.", state=_ALONE
    )
    worker_cls: str = flag(
        "auto",
        "Class of the workers.",
        state=refused("write an executor plugin and name it with --distributed-executor-backend"),
    )
    worker_extension_cls: str = flag(
        "",
        "Class mixed into the workers.",
        state=refused("write an executor plugin and name it with --distributed-executor-backend"),
    )
    enable_fault_tolerance: bool = flag(
        False, "Go on when a worker is lost.", state=later("engines that outlive a worker")
    )
    fault_tolerance_config: Mapping[str, Any] = flag(
        {}, "How to go on.", state=later("engines that outlive a worker")
    )
    weight_transfer_config: Mapping[str, Any] | None = flag(
        None, "How weights are replaced while running.", state=later("weight transfer")
    )
