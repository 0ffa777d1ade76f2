"""The KV cache: size, data type, prefix caching."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["CacheConfig"]


@flag_group
class CacheConfig(FlagGroup):
    """The KV cache: size, data type, prefix caching."""

    title = "CacheConfig"

    block_size: int | None = flag(
        None, "Tokens per KV cache block. Default: the platform's.", unit="tokens", least=1,
        most=4096,
    )  # fmt: skip
    gpu_memory_utilization: float = flag(
        0.92,
        "Fraction of the device's memory for weights and KV cache together.",
        unit="fraction",
        least=0.0,
        most=1.0,
        aliases=("--device-memory-utilization",),
        common=True,
    )
    kv_cache_memory_bytes: int | None = flag(
        None,
        "Size of the KV cache; overrides --gpu-memory-utilization.",
        unit="bytes",
        least=1,
        common=True,
    )
    kv_cache_dtype: str = flag(
        "auto",
        "Data type of the KV cache: auto, the model's; another type, such as bfloat16 or int8; "
        "fp8, with the checkpoint's scales; or a format of an installed attention backend.",
    )
    kv_cache_dtype_skip_layers: tuple[str, ...] = flag(
        (), "Layers whose cache has the model's data type: indices, or sliding_window."
    )
    calculate_kv_scales: bool = flag(
        False, "Calculate the scales of an fp8 cache in the first step; ignore the checkpoint's."
    )
    num_gpu_blocks_override: int | None = flag(
        None, "Number of KV cache blocks, regardless of memory.", unit="blocks", least=1
    )
    enable_prefix_caching: bool | None = flag(
        None,
        "Reuse the cache of prompts with the same beginning. Default: if the model supports it.",
        common=True,
    )
    prefix_caching_hash_algo: str = flag(
        "sha256",
        "Hash function for the content of blocks.",
        choices=("sha256", "sha256_cbor", "xxhash", "xxhash_cbor", "builtin"),
    )
    mamba_block_size: int | None = flag(
        None, "Tokens between two saved recurrent states. Default: 512.", unit="tokens", least=64
    )
    mamba_cache_mode: str | None = flag(
        None,
        "Recurrent states to save for prefix caching: none, or all (one every --mamba-block-size "
        "tokens of a prompt). align is not supported yet.",
        choices=("none", "all", "align"),
    )
