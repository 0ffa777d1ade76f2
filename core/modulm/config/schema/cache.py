"""The memory that keys and values of past tokens live in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.config.schema.flags import equip, flag, later, no_effect, refused

__all__ = ["CacheConfig"]

_STATE = "states are kept in the model's own format, by the kernels of the platform"
_OFFLOAD = "weights offloaded to host memory"
_TRANSFER = "KV transfer between engines"


@frozen(kw_only=True, field_transformer=equip)
class CacheConfig:
    """The memory that keys and values of past tokens live in."""

    TITLE: ClassVar[str] = "CacheConfig"
    TABLE: ClassVar[str | None] = None

    block_size: int | None = flag(
        None, "Tokens in one block of cache; None: the platform's.", unit="tokens", least=1,
        most=4096,
    )  # fmt: skip
    gpu_memory_utilization: float = flag(
        0.92,
        "Share of the device's memory that weights and cache may take together.",
        unit="fraction",
        least=0.0,
        most=1.0,
        aliases=("--device-memory-utilization",),
    )
    kv_cache_memory_bytes: int | None = flag(
        None, "Size of the cache; replaces --gpu-memory-utilization.", unit="bytes", least=1
    )
    kv_cache_dtype: str = flag(
        "auto",
        "Number format of the cache; auto: the model's; fp8: fp8_e4m3, without scales; int8: with "
        "a scale per token and head.",
        choices=("auto", "bfloat16", "float16", "float32", "int8", "fp8", "fp8_e4m3", "fp8_e5m2",
                 "fp8_inc"),
    )  # fmt: skip
    num_gpu_blocks_override: int | None = flag(
        None, "Number of cache blocks, whatever the memory allows.", unit="blocks", least=1
    )
    enable_prefix_caching: bool | None = flag(
        None, "Reuse blocks of prompts that begin alike; None: yes where the model allows it."
    )
    prefix_caching_hash_algo: str = flag(
        "sha256",
        "Hash that names a block's content.",
        choices=("sha256", "sha256_cbor", "xxhash", "xxhash_cbor", "builtin"),
    )
    prefix_cache_retention_interval: int = flag(
        0,
        "Seconds for which a cached prefix is kept.",
        unit="s",
        state=later("retention of prefixes"),
    )
    kv_cache_dtype_skip_layers: tuple[str, ...] = flag(
        (), "Layers that keep the model's number format.", state=later("formats by layer")
    )
    swap_space: float = flag(
        4,
        "Host memory for preempted sequences.",
        unit="GiB",
        deprecated="preempted sequences are recomputed",
        state=no_effect("a preempted sequence is recomputed, never swapped"),
    )
    calculate_kv_scales: bool = flag(
        False,
        "Find the scales of an fp8 cache while running.",
        state=later("scales found at run time"),
    )
    kv_sharing_fast_prefill: bool = flag(
        False,
        "Skip prompt tokens in layers that share another's cache.",
        state=later("shared caches"),
    )
    swa_bounded_replay: bool = flag(
        True,
        "Recompute only a window after a preemption.",
        state=no_effect("sequences are recomputed whole"),
    )
    prefix_match_unit: int | None = flag(
        None,
        "Tokens by which prefixes are matched.",
        unit="tokens",
        state=no_effect("prefixes are matched by whole blocks"),
    )
    mamba_cache_dtype: str = flag("auto", "Number format of recurrent states.", state=later(_STATE))
    mamba_ssm_cache_dtype: str = flag(
        "auto", "The same for the scan's state alone.", state=later(_STATE)
    )
    mamba_block_size: int | None = flag(
        None, "Tokens between two kept states; None: 512.", unit="tokens", least=64
    )
    mamba_cache_mode: str | None = flag(
        None,
        "Which recurrent states are kept, so that prompts that begin alike share them: all, at "
        "every block of --mamba-block-size tokens of a prompt, or none.",
        choices=("none", "all", "align"),
    )
    mamba_backend: str = flag("triton", "Kernels of recurrent layers.", state=later(_STATE))
    mamba_ssu_algorithm: str | None = flag(
        None, "Algorithm of the state update.", state=later(_STATE)
    )
    enable_mamba_cache_stochastic_rounding: bool = flag(
        False, "Round states at random.", state=later(_STATE)
    )
    mamba_cache_philox_rounds: int = flag(0, "Rounds of that randomness.", state=later(_STATE))
    enable_mamba_shared_prefix_checkpoint: bool = flag(
        False, "Keep states of shared prefixes.", state=later(_STATE)
    )
    replayssm_buffer_len: int = flag(
        16, "Tokens kept for replaying a state.", unit="tokens", state=later(_STATE)
    )
    use_replayssm: bool = flag(False, "Replay states instead of keeping them.", state=later(_STATE))
    kv_offloading_size: float | None = flag(
        None, "Host memory for evicted blocks.", unit="GiB", state=later("a second tier of cache")
    )
    kv_offloading_backend: str = flag(
        "native", "Where evicted blocks go.", state=later("a second tier of cache")
    )
    kv_transfer_config: Mapping[str, Any] | None = flag(
        None, "Connector that moves blocks between engines.", state=later(_TRANSFER)
    )
    kv_events_config: Mapping[str, Any] | None = flag(
        None, "Publish what happens to blocks.", state=later(_TRANSFER)
    )
    ec_transfer_config: Mapping[str, Any] | None = flag(
        None, "Connector for encoder outputs.", state=later(_TRANSFER)
    )
    ec_manager_config: Mapping[str, Any] = flag(
        {}, "Manager of encoder outputs.", state=later(_TRANSFER)
    )
    cpu_offload_gb: float = flag(
        0, "Weights kept in host memory.", unit="GiB", least=0, state=later(_OFFLOAD)
    )
    cpu_offload_params: tuple[str, ...] = flag((), "Which weights.", state=later(_OFFLOAD))
    offload_backend: str = flag("auto", "How weights are offloaded.", state=later(_OFFLOAD))
    offload_group_size: int = flag(0, "Layers per group.", state=later(_OFFLOAD))
    offload_num_in_group: int = flag(1, "Offloaded layers per group.", state=later(_OFFLOAD))
    offload_prefetch_step: int = flag(1, "Groups fetched ahead.", state=later(_OFFLOAD))
    offload_params: tuple[str, ...] = flag(
        (), "Weights that may be offloaded.", state=later(_OFFLOAD)
    )
    prompt_adapters: tuple[str, ...] | None = flag(
        None,
        "Prompt adapters.",
        state=refused("prompt adapters are gone everywhere; use --lora-modules"),
    )
    enable_prompt_adapter: bool | None = flag(
        None,
        "Prompt adapters.",
        state=refused("prompt adapters are gone everywhere; use --enable-lora"),
    )
    max_prompt_adapters: int = flag(
        1, "Prompt adapters in a batch.", state=refused("use --max-loras")
    )
    max_prompt_adapter_token: int = flag(
        0, "Tokens of prompt adapters.", state=refused("use --max-lora-rank")
    )
    use_v2_block_manager: bool = flag(
        True,
        "The second block manager.",
        deprecated="there is one block manager",
        state=no_effect("there is one block manager"),
    )
